"""What every HTTP server here shares: authentication, and running an application in a thread."""

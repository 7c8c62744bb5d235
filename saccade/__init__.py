"""Real-time video analytics with a vision-language model.

The import name of four packages that stand at the top of the repository; here are links to them:

    saccade.sources   where frames come from
    saccade.engine    the vision-language model: an image and tasks in, boxes, points and texts out
    saccade.sinks     where results go
    saccade.pipeline  joins the three: configuration, streams, servers, command line
"""

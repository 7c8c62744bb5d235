"""Results as messages for other systems: MQTT, webhooks, and the events they tell."""

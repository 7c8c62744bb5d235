"""Results as messages for other systems: an MQTT broker and webhooks, and the events that both send."""

from saccade.sinks.messaging.events import Change, Event, EventTracker, Observation
from saccade.sinks.messaging.mqtt import MqttSink
from saccade.sinks.messaging.webhook import WebhookSink

__all__ = ["Change", "Event", "EventTracker", "MqttSink", "Observation", "WebhookSink"]

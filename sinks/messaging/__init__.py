"""Sinks that send messages to other systems: an MQTT broker and webhooks."""

from saccade.sinks.messaging.events import Change, Event, EventTracker, Observation
from saccade.sinks.messaging.mqtt import MqttSink
from saccade.sinks.messaging.webhook import WebhookSink

__all__ = ["Change", "Event", "EventTracker", "MqttSink", "Observation", "WebhookSink"]

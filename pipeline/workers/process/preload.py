"""Imports what a worker needs, in a process that workers are forked from. Starts nothing: threads survive no fork."""

import torch  # noqa: F401

import saccade.engine.api
import saccade.pipeline.server.console
import saccade.sources.rtsp.client  # noqa: F401

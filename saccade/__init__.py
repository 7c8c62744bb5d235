"""Real-time video analytics with a vision-language model.

This package contains symbolic links to the four top-level packages of the repository:

    saccade.sources   video sources: files, cameras, WebRTC publishers
    saccade.engine    the vision-language model: takes an image and tasks, returns boxes, points and texts
    saccade.sinks     outputs for results
    saccade.pipeline  joins sources, engine and sinks: configuration, streams, servers, command line
"""

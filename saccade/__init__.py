"""Real-time video analytics with a vision-language model.

This package links the four top-level packages of the repository:

    saccade.sources   video sources: files, cameras, publishers
    saccade.engine    the vision-language model: takes an image and tasks, returns boxes, points and texts
    saccade.sinks     outputs of results
    saccade.pipeline  joins the three: configuration, streams, servers, command line
"""

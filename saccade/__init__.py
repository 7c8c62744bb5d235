"""Real-time video analytics with a vision-language model.

The four packages are symbolic links to top-level folders of the repository:

- `saccade.sources`: video sources, such as files, cameras and WebRTC publishers.
- `saccade.engine`: the vision-language model. Its input is an image with tasks; its output is boxes, points and texts.
- `saccade.sinks`: outputs for results.
- `saccade.pipeline`: streams, which connect sources, engine and sinks; configuration, HTTP servers and command line.
"""

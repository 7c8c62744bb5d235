"""What the tests of sinks share: a broker, web servers, the feed, a full disk, MP4 boxes, frames with results."""

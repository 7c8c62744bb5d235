"""RTP: packets, payloads put together, the order of arrival mended, sender reports."""

"""Converts event filters from URL query parameters to an `EventQuery`, and back."""

from __future__ import annotations

from saccade.pipeline.events.storage.store_reader import EventQuery, finite, time_of_text

_KNOWN = ("stream", "rule", "label", "zone", "since", "q", "limit", "after", "token")


def query_of(given: dict[str, str]) -> EventQuery:
    """Convert the query parameters of a URL to an event query.

    Raises:
        ValueError: if a filter is invalid. The message is for the user.
    """
    if unknown := next((name for name in given if name not in _KNOWN), None):
        raise ValueError(f"unknown filter '{unknown[:40]}'; available: {', '.join(_KNOWN[:-1])}")
    limit = given.get("limit", "50")
    if not limit.isdecimal() or len(limit) > 9:
        raise ValueError("limit (events per page) should be a whole number, such as 50")
    since = time_of_text(given["since"]) if "since" in given else None
    wrong = "after should be the value of `after` in the previous page"
    after = finite(given["after"], wrong) if "after" in given else None
    stream, rule, label, zone = map(given.get, ("stream", "rule", "label", "zone"))
    return EventQuery(stream, rule, label, zone, since, given.get("q", ""), after, int(limit))


def filters_of(query: EventQuery) -> dict[str, str]:
    """Convert an event query to query parameters of a URL."""
    filters = {
        "stream": query.stream,
        "rule": query.rule,
        "label": query.label,
        "zone": query.zone,
        "since": None if query.since is None else repr(query.since),
        "q": query.words or None,
        "after": None if query.after is None else repr(query.after),
    }
    return {name: value for name, value in filters.items() if value is not None} | {"limit": str(query.limit)}

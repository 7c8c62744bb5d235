"""What tests share: models, cameras, brokers, browsers, peers. `REPO` is the checkout under test."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

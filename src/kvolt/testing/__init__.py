"""Test tools for users: an event loop with virtual time, an in-memory network, and conformance suites.

Suites exist for Discovery, EventPlane, the request plane (two parts), engines and lower tiers.
"""

from kvolt.testing import events_suite
from kvolt.testing.discovery import suite as discovery_suite
from kvolt.testing.plane import faults_suite as plane_faults_suite
from kvolt.testing.plane import suite as plane_suite
from kvolt.testing.virtual.link import LinkProfile
from kvolt.testing.virtual.loop import (
    Deadlock,
    InlineBlocking,
    Leak,
    Runaway,
    Unhandled,
    VirtualClock,
    VirtualLoop,
    run_virtual,
)
from kvolt.testing.virtual.network import VirtualHost, VirtualNetwork
from kvolt.testing.virtual.ports import VirtualProcess

__all__ = [
    "Deadlock",
    "InlineBlocking",
    "Leak",
    "LinkProfile",
    "Runaway",
    "Unhandled",
    "VirtualClock",
    "VirtualHost",
    "VirtualLoop",
    "VirtualNetwork",
    "VirtualProcess",
    "discovery_suite",
    "events_suite",
    "plane_faults_suite",
    "plane_suite",
    "run_virtual",
]

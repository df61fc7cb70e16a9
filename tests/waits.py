"""How long tests wait for what must happen: seconds on a busy machine, milliseconds on an idle one."""

MUST_HAPPEN_S = 30.0

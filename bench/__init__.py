"""What the proxy costs beside others, and what it is for: `./scripts/bench`.

The main figure is the CPU time of a proxy's processes for one unit of work (a request, a chunk, a megabyte), as a
multiple of nginx's in the same run: machines differ and are noisy, but what a proxy does per unit is the same
everywhere. Repetitions are interleaved over the proxies, so that a slow minute of the machine hits all of them, and
the medians are compared.

    load generator ──► proxy ──► upstream          each a process; with two cores the proxy has one for itself

`client.py` and `upstream.py` are raw protocols on uvloop that do nothing but their part, so that neither is what is
measured. `peers.py` says how each proxy is started, `workloads.py` what is asked of it, `measuring.py` does it.
Beside that stand three measurements of this proxy alone: its queue (`queueing.py`), its lock (`locks.py`) and the
swaps that it saves (`swaps.py`). `report.py` and `goals.py` write it down.
"""

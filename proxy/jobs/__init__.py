"""Jobs: requests that are written down, answered with 202, and run later by the proxy itself.

A client that cannot hold a connection for as long as the GPU is somebody else's asks for one with `Prefer:
respond-async` (RFC 7240). The job waits in the same queue under the same kind of lease and goes through the same
exchange as any request. What makes it a job is on disk, and the order of the writes is the whole promise:

    request written ─► 202 ─► waits ─► lease ─► RUNNING written ─► first byte upstream ─► answer written ─► SUCCEEDED

Before *running* is on disk nothing was sent, so after a crash a queued job is simply queued again. After it something
may have been sent, so a running job is never run again: it has been interrupted. A result is whole on disk before the
job is said to have succeeded.
"""

from proxy.jobs.desk import Jobs, wants_job
from proxy.jobs.pages import JOB_PAGES, accept, make_job_pages
from proxy.jobs.runner import Limits
from proxy.jobs.store import Store

__all__ = ["JOB_PAGES", "Jobs", "Limits", "Store", "accept", "make_job_pages", "wants_job"]

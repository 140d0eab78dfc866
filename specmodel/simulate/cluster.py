"""A sweep on an existing Dask cluster (extra ``cluster``)."""

from __future__ import annotations

import importlib
import logging
import pydoc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

from specmodel.errors import SpecModelError, UsageError
from specmodel.simulate.grid import Job

__all__ = ["on_cluster"]

_ANSWER_S, _WORKERS_S = 20, 60
_RETRIES = 3


def on_cluster(
    address: str, packed: bytes, blocks_for: Callable[[int], Sequence[Sequence[Job]]]
) -> Iterator[list[str]]:
    """Run blocks on the workers of a scheduler; give the lines of each as it ends.

    The scheduler gives the blocks of a lost worker to others.

    Parameters
    ----------
    address : str
        Such as ``tcp://10.0.0.1:8786``.
    packed : bytes
        The pickled model.
    blocks_for : callable
        Gives blocks of jobs, enough for so many threads of workers.

    Raises
    ------
    UsageError
        Dask is not installed, nothing answers at the address, or the workers have no such version of specmodel.
    SpecModelError
        A block was lost with several workers, one after another, or the scheduler is gone.
    """
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise UsageError("--scheduler needs Dask: pip install 'specmodel[cluster]'") from None
    from specmodel import __version__
    from specmodel.simulate.sweep import answers_of

    with _connected(distributed, address) as client:
        try:
            client.wait_for_workers(1, timeout=_WORKERS_S)
        except TimeoutError:
            raise UsageError(f"the scheduler at {address} has no worker; start one: dask worker {address}") from None
        # What is run there must not itself need specmodel.
        for worker, version in client.run(pydoc.locate, "specmodel.__version__", on_error="return").items():
            if version != __version__:
                has = f"specmodel {version}" if isinstance(version, str) else "no specmodel"
                raise UsageError(f"the worker {worker} has {has}; install specmodel {__version__} on every worker")
        blocks = blocks_for(sum(client.nthreads().values()))
        futures = [client.submit(answers_of, packed, list(b), pure=False, retries=_RETRIES) for b in blocks]
        try:
            for future in distributed.as_completed(futures, loop=client.loop):
                try:
                    lines = future.result()
                except distributed.KilledWorker as error:
                    raise SpecModelError(
                        f"a block of scenarios was lost with several workers in turn ({str(error).splitlines()[0]}); "
                        "run the same command again to go on, on workers with more memory"
                    ) from None
                yield lines
                future.release()
        finally:
            client.cancel([f for f in futures if not f.done()], force=True)


@contextmanager
def _connected(distributed: Any, address: str) -> Iterator[Any]:
    """Give a client of the scheduler; what Dask would log of a loss is said in one sentence."""
    log = logging.getLogger("distributed.client")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        try:
            client = distributed.Client(address, timeout=_ANSWER_S, set_as_default=False)
        except (TimeoutError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise UsageError(f"no Dask scheduler answers at {address}: {reason.splitlines()[0]}") from None
        try:
            yield client
        except (CancelledError, distributed.comm.CommClosedError):
            raise SpecModelError(
                f"the scheduler at {address} is gone; start it and run the same command again to go on"
            ) from None
        finally:
            client.close()
    finally:
        log.setLevel(level)

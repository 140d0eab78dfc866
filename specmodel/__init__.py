"""specmodel: a calibrated cost model of speculative decoding.

From few measurements of a deployment it predicts tok/s for any step count, says how sure it is, and chooses the best
configuration. ``import specmodel as sm``; ``sm.load``, ``sm.fit``, ``sm.optimize``, ``sm.validate``.
"""

from __future__ import annotations

import importlib
import sys
import types

__version__ = "0.1.0"

# Where each public name lives; a module is imported when its first name is asked for.
_HOME = {
    "CalibrationError": "errors",
    "SpecModelError": "errors",
    "UsageError": "errors",
    "Calibration": "calibration",
    "dump": "io",
    "dumps": "io",
    "from_dict": "io",
    "json_schema": "io",
    "load": "io",
    "loads": "io",
    "fit": "fit",
    "FittedModel": "model",
    "Prediction": "prediction",
    "Optimum": "optimum",
    "optimize": "decide",
    "report": "report_page",
    "schedule": "schedule",
    "cross_validate": "validate",
    "Diagnosis": "diagnosis",
    "diagnose": "diagnose",
    "simulate": "simulate",
    "validate": "validate",
    "sweep": "whatif",
    "whatif": "whatif",
}

__all__ = sorted(_HOME)


class _Package(types.ModuleType):
    """The package: importing `specmodel.fit` would bind that module to `specmodel.fit`, where the function belongs."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, types.ModuleType) and name in _HOME:
            if _HOME[name] != name:
                return  # the module `specmodel.report` is reached by importing from it; the name is the function
            value = getattr(value, name, value)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

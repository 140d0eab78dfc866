"""What looks like a secret does not leave with a report: the last line of defence, over every text that it shows.

The readers of logs leave secrets out of a calibration already; one that was typed into a note or a flag is caught here.
"""

from __future__ import annotations

import re

__all__ = ["MARK", "without_secrets"]

MARK = "[redacted]"
_KEYS = (
    r"api[_-]?keys?|passw(?:or)?ds?|passphrase|secrets?|credentials?"
    r"|(?:access|auth|api|hf|bearer|session)[_-]?tokens?"
)
_WHOLE = re.compile(
    "|".join(
        (
            r"-----BEGIN [A-Z ]{1,40}-----(?s:.*)",
            r"\b(?:hf|sk|pk|rk|ghp|gho|ghs|ghu|github_pat|glpat|xox[abeprs]|nvapi|gsk|npm|pypi)[-_]"
            r"(?=[A-Za-z_.-]*[0-9]|[A-Za-z0-9]{16})[A-Za-z0-9_.-]{10,}",
            r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[A-Za-z0-9_-]{20,}|\bya29\.[A-Za-z0-9_-]{10,}",
            r"\beyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)+",
        )
    )
)
# What stands before the value is kept, so that a reader sees what was left out.
_VALUE = re.compile(
    rf"((?i:\bbearer|\bbasic)\s+(?=\S*[0-9])|(?i:[\w.-]{{0,40}}(?:{_KEYS}))['\"]?(?:\s*[=:]\s*|\s+(?:\\\s+)?(?=\S*\d))['\"]?)"
    r"([^\s'\",;)<>]{4,})"
)
_LOGIN = re.compile(r"(?<=://)[^\s/@]{1,200}@")


def without_secrets(value: str) -> str:
    """Return the text with what looks like a secret replaced by a mark, and logins taken out of addresses."""
    if len(value) < 6:
        return value
    value = _LOGIN.sub("", _WHOLE.sub(MARK, value))
    return _VALUE.sub(lambda found: found[1] + MARK, value)

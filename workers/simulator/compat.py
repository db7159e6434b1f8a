"""`override` for Python 3.11, whose typing module does not have it yet."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import override
else:

    def override(method: Any) -> Any:
        """Mark a method that takes the place of an inherited one; for the type checker only."""
        return method


__all__ = ["override"]

"""Marks: the named instants of a run that before and after hang on.

What makes one (`events`, pure), what one is and how it is told (`mark`, pure), how the figures
changed there (`effect`, pure); the one way in for events (`noting`); the store (`archive`).
"""

from common.marks.events import Event
from common.marks.mark import Mark

__all__ = ["Event", "Mark"]

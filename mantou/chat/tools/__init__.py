"""Tool calls in a model's text: one small parser a format, all incremental. Knows no HTTP and no engine.

`detect` or `named` tells how a model writes calls, `ToolUse` joins that with the tools of a request, and a
`ToolSplitter` over it tells calls from text while the answer is made.
"""

from mantou.chat.tools.formats import check_name, detect, named
from mantou.chat.tools.splitter import ToolFormat, ToolSplitter, ToolUse

__all__ = ["ToolFormat", "ToolSplitter", "ToolUse", "check_name", "detect", "named"]

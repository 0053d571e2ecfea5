"""Answers the rows of a batch with an engine whose processes vLLM spawns, as it does when it is served.

`python spawned_engine.py REQUEST ANSWER`: paths of JSON files, `{"options", "rows", "tokens"}` and the answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":  # spawned processes import this file
    sys.path.insert(0, str(Path(__file__).parent))
    from engine_program import Commands  # type: ignore[import-not-found] # beside this file

    request = json.loads(Path(sys.argv[1]).read_text())
    commands = Commands(request["options"])
    Path(sys.argv[2]).write_text(json.dumps(commands.generate(request["rows"], request["tokens"])))
    commands.llm.llm_engine.engine_core.shutdown()

"""A fake model store: its script says whether there is a model."""

import json
import os
import sys
from pathlib import Path

plan = json.loads(Path(os.environ["FAKE_SCRIPT"]).read_text()).get("model", {})
print("looking for the model", file=sys.stderr)
if "error" in plan:
    print(f"error: {plan['error']}", file=sys.stderr)
    sys.exit(1)
print("/models/fake")

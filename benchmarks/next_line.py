"""A small task for lm-eval, made of a text: choose the next line out of four.

    python benchmarks/next_line.py examples/heldout.txt task
    lm_eval --include_path task --tasks next_line ...

Needs no network. docs/how-to/serve.md has the figures.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

BEFORE = 8  # lines of the question
CHOICES = 4
TASK = """task: next_line
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""


def main(text: Path, folder: Path) -> None:
    """Write the questions and the task. Wrong lines come from the same text; every run draws the same."""
    lines = [line for line in text.read_text(encoding="utf-8").splitlines() if line.strip()]
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    questions = folder / "next_line.jsonl"
    with questions.open("w", encoding="utf-8") as out:
        for number in range(BEFORE, len(lines)):
            choices = draw.sample([line for line in lines if line != lines[number]], CHOICES - 1)
            label = draw.randrange(CHOICES)
            choices.insert(label, lines[number])
            before = "\n".join(lines[number - BEFORE : number]) + "\n"
            out.write(json.dumps({"text": before, "choices": choices, "label": label}) + "\n")
    (folder / "next_line.yaml").write_text(TASK.format(questions=questions.absolute()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

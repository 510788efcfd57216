"""Run by the transformers peer's own Python: teacher-forced log-probabilities of given tokens.

    python peer_logprobs.py HF_DIRECTORY < {"prompts": [[...]], "outputs": [[...]]}

Prints per output token its log-probability, the best token, and the best token's lead over the
second, as JSON. Standard library and the peer only.
"""

from __future__ import annotations

import json
import sys

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def rows(model, prompt: list[int], output: list[int]) -> list[dict[str, float]]:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    first, second = logprobs.topk(2).values.unbind(dim=-1)
    return [
        {
            "logprob": logprobs[i, token].item(),
            "best": logprobs[i].argmax().item(),
            "lead": (first[i] - second[i]).item(),
        }
        for i, token in enumerate(output)
    ]


def main() -> None:
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.float32, local_files_only=True
    ).eval()
    asked = json.load(sys.stdin)
    pairs = zip(asked["prompts"], asked["outputs"], strict=True)
    print(json.dumps([rows(model, prompt, output) for prompt, output in pairs]))


if __name__ == "__main__":
    main()

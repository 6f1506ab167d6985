"""What transformers and PEFT compute from the dequantized weights, in 32-bit floats on a CPU."""

import math
from dataclasses import dataclass

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from verified.models import GREEDY_TOKENS, TOP, WINDOW, WINDOWS, lessons, text

RANK, TARGETS, RATE = 8, ["q_proj", "k_proj", "v_proj", "o_proj"], 2e-3
STEPS, LESSONS = 10, 2


@dataclass(frozen=True)
class Step:
    """A greedy token, the margin to the second, and the likeliest tokens with their log-probabilities."""

    token: int
    margin: float
    top: dict[int, float]


class Peer:
    """The model and its tokenizer."""

    def __init__(self, path):
        source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        if hasattr(transformers, "GgufConfig"):
            source["quantization_config"] = transformers.GgufConfig(dequantize=True)
        self.base = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation="eager").eval()
        assert all(weight.dtype == torch.float32 for weight in self.base.parameters())

    def prompts(self, texts):
        return [self.tokenizer(text).input_ids for text in texts]

    @torch.inference_mode()
    def greedy(self, model, prompt):
        """The steps that follow a prompt."""
        steps, tokens, cache = [], prompt, None
        for _ in range(GREEDY_TOKENS):
            out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
            top = torch.topk(torch.log_softmax(out.logits[0, -1], -1), TOP)
            likeliest = dict(zip(top.indices.tolist(), top.values.tolist()))
            steps.append(Step(int(top.indices[0]), float(top.values[0] - top.values[1]), likeliest))
            tokens, cache = [steps[-1].token], out.past_key_values
        return steps

    def windows(self):
        """Windows of the text as llama-perplexity cuts them: the token that begins a text stands first in each, if there is one."""
        tokens, begin = self.tokenizer(text()).input_ids, self.tokenizer.bos_token_id
        begins = tokens[0] == begin
        cut = [tokens[at * WINDOW : (at + 1) * WINDOW] for at in range(WINDOWS)]
        return [[begin, *window[1:]] if begins else window for window in cut]

    @torch.inference_mode()
    def perplexity(self, windows):
        losses = []
        for window in windows:
            logits = self.base(torch.tensor([window])).logits[0, WINDOW // 2 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(window[WINDOW // 2 + 1 :])).item())
        return math.exp(sum(losses) / len(losses))

    def train(self, folder):
        """Trains a LoRA for a few steps, saves it into the folder, and returns the adapted model."""
        torch.manual_seed(0)
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
        adapted: PeftModel = get_peft_model(self.base, config).train()
        optimizer = torch.optim.AdamW((weight for weight in adapted.parameters() if weight.requires_grad), lr=RATE)
        texts = [self.tokenizer(lesson).input_ids for lesson in lessons()]
        for step in range(STEPS):
            for tokens in texts[step * LESSONS : (step + 1) * LESSONS]:
                ids = torch.tensor([tokens])
                (adapted(ids, labels=ids).loss / LESSONS).backward()
            optimizer.step()
            optimizer.zero_grad()
        adapted.save_pretrained(folder)
        return adapted.eval()

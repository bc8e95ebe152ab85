import json
from pathlib import Path
from types import SimpleNamespace


def is_deepseek_dsa(config):
    return getattr(config, "index_topk", None) is not None


class ModelConfig:
    def __init__(self, model_path):
        self.hf_config = SimpleNamespace(**json.loads(Path(model_path, "config.json").read_text()))
        text = getattr(self.hf_config, "text_config", None)
        self.hf_text_config = self.hf_config if text is None else SimpleNamespace(**text)
        self.kv_lora_rank = getattr(self.hf_text_config, "kv_lora_rank", None)

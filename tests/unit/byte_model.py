"""A served model whose tokens are single bytes, so that tests can count them."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from common.metrics import GatewayMetrics
from gateway.api import Api, Limits
from gateway.chat_template import ChatTemplate
from gateway.served_model import ServedModel
from gateway.tokenizer import Tokenizer as ServedTokenizer
from tests.service.fake_backend import FakeBackend

BOS_ID = 256
EOS_ID = 257
VOCAB_SIZE = 260
"""Two ids more than the tokenizer knows, as padded models have."""
MAX_CONTEXT = 100

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ reasoning_effort }}"
)


def make_byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without a merge: 256 bytes, BOS (put before every prompt) and EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return tokenizer


def make_model() -> ServedModel:
    return ServedModel(
        name="bytes",
        root="bytes",
        created=1,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS_ID,),
        tokenizer=ServedTokenizer(make_byte_tokenizer(), (EOS_ID,)),
        template=ChatTemplate(TEMPLATE, {}),
    )


def make_api(*, model: ServedModel | None = None, max_context: int = MAX_CONTEXT, limits: Limits | None = None) -> Api:
    backend = FakeBackend(max_context)
    return Api(
        backend=backend,
        model=model or make_model(),
        limits=limits or Limits(),
        metrics=GatewayMetrics("bytes", backend.workers, dict),
    )

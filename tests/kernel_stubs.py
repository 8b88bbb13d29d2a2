"""Attention kernels by their published signatures, computed text by text with plain products: their packages need GPUs.

Signatures of flash-attn 2.8 (`flash_attn/flash_attn_interface.py`), 3 (`hopper/flash_api.cpp` and
`hopper/flash_attn_interface.py`) and 4 (`flash_attn/cute/interface.py`) as in Dao-AILab/flash-attention at 0251105, of
August 2026. What the package `kernels` loads has flash-attn 3's operator under a namespace of its own, and `s_aux`;
flash-attn 2's and AMD's as in huggingface/kernels-community at 40d4194, of August 2026.
"""

import math
import types

import torch
from torch import Tensor, nn

FLASH_2 = (
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
    "int window_size_left, int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
    "-> (Tensor, Tensor)"
)
FLASH_2_PACKED = (
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "int max_seqlen_q, int max_seqlen_k, float dropout_p, float softmax_scale, bool causal, int window_size_left=-1, "
    "int window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False, "
    "int num_splits=0) -> (Tensor, Tensor)"
)
FLASH_3 = (
    "{name}(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, Tensor? out=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool {causal}=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, "
    "int num_splits=0, bool? pack_gqa=None, int sm_margin=0{more}) -> (Tensor, Tensor)"
)
KERNELS_2 = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? out_, Tensor? alibi_slopes_, float p_dropout, float softmax_scale, "
    "bool is_causal, int window_size_left, int window_size_right, float softcap, bool return_softmax, "
    "Generator? gen_) -> (Tensor, Tensor)"
)
KERNELS_2_PACKED = (
    "varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor? out_, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? seqused_k_, Tensor? leftpad_k_, Tensor? block_table_, Tensor? alibi_slopes_, int max_seqlen_q, "
    "int max_seqlen_k, float p_dropout, float softmax_scale, bool zero_tensors, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool return_softmax, Generator? gen_) -> (Tensor, Tensor)"
)
AITER_PACKED = (
    "mha_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, int max_seqlen_q, "
    "int max_seqlen_k, int min_seqlen_q, float dropout_p, float softmax_scale, float logits_soft_cap, "
    "bool zero_tensors, bool is_causal, int window_size_left, int window_size_right, int sink_size, "
    "bool return_softmax_lse, bool return_dropout_randval, Tensor? out, Tensor? block_table, Tensor? bias, "
    "Tensor? alibi_slopes, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, Generator? gen, "
    "Tensor? cu_seqlens_q_padded, Tensor? cu_seqlens_k_padded, Tensor? s_aux) -> (Tensor, Tensor)"
)
TORCH_PACKED = (
    "_varlen_attn(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor? cu_seq_k, SymInt max_q, "
    "SymInt max_k, bool is_causal=False, float? scale=None, SymInt[]? window_size=None) -> (Tensor, Tensor)"
)
OPERATORS = {
    "flash 2": ("flash_attn", FLASH_2),
    "flash 2, packed": ("flash_attn", FLASH_2_PACKED),
    "flash 3": ("flash_attn_3", FLASH_3.format(name="fwd", causal="is_causal", more="")),
    "flash 3, custom": ("flash_attn_3", FLASH_3.format(name="_flash_attn_forward", causal="causal", more="")),
    "kernels, flash 2": ("_flash_attn2_1f0a3b9", KERNELS_2),
    "kernels, flash 2, packed": ("_flash_attn2_1f0a3b9", KERNELS_2_PACKED),
    "kernels, AMD, packed": ("_aiter_flash_attn_ck_5c2d", AITER_PACKED),
    "kernels": (
        "_flash_attn3_7d4c2e1",
        FLASH_3.format(name="fwd", causal="is_causal", more=", Tensor? s_aux=None"),
    ),
}


def text_logits(q: Tensor, k: Tensor, given: dict, head_slopes: Tensor | None = None) -> Tensor:
    """(heads, queries, keys) of one text with heads behind tokens; −∞ where a key is masked. Both end together."""
    scale = given.get("scale")
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if given.get("softcap"):
        logits = given["softcap"] * torch.tanh(logits / given["softcap"])
    distance = (torch.arange(len(q)) + len(k) - len(q))[:, None] - torch.arange(len(k))
    if head_slopes is not None:
        logits = logits - head_slopes[:, None, None] * distance.abs()
    back, ahead = given.get("window", (-1, -1))
    back, ahead = math.inf if back in (None, -1) else back, math.inf if ahead in (None, -1) else ahead
    ahead = 0 if given.get("causal") else ahead
    return logits.masked_fill((distance > back) | (-distance > ahead), -torch.inf)


def texts(q: Tensor, k: Tensor, v: Tensor, given: dict) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each text's own tokens: of a batch, packed, or with a cache of which some keys are used."""
    if given.get("pages") is not None:
        k, v = (torch.stack([torch.cat([part[page] for page in row]) for row in given["pages"]]) for part in (k, v))
    if given.get("used") is not None:
        return [(q[n], k[n][:used], v[n][:used]) for n, used in enumerate(given["used"].tolist())]
    if given.get("query_ends") is None:
        return list(zip(q, k, v, strict=True))
    spans = [ends.tolist() for ends in (given["query_ends"], given["key_ends"])]
    pairs = zip(*(zip(ends, ends[1:], strict=False) for ends in spans), strict=True)
    return [(q[a:b], k[c:d], v[c:d]) for (a, b), (c, d) in pairs]


def attention(q: Tensor, k: Tensor, v: Tensor, given: dict) -> Tensor:
    outputs = []
    for q_text, k_text, v_text in texts(q, k, v, given):
        logits = text_logits(q_text, k_text, given, given.get("slopes"))
        if given.get("sinks") is not None:
            column = given["sinks"][:, None, None].expand(-1, len(q_text), 1)
            logits = torch.cat([logits, column.to(logits)], -1)
        p = logits.softmax(-1).nan_to_num(0.0)[..., : len(k_text)]
        v_text = v_text.repeat_interleave(q.shape[-2] // v.shape[-2], 1)
        outputs.append(torch.einsum("hqk,khd->qhd", p, v_text))
    return torch.cat(outputs) if q.dim() == 3 else torch.stack(outputs)


def given_of(arguments: dict) -> dict:
    """What a kernel's arguments ask for, in the words of this file."""
    arguments = {name.rstrip("_"): value for name, value in arguments.items()}
    window = arguments.get("window_size") or (
        arguments.get("window_size_left", -1),
        arguments.get("window_size_right", -1),
    )
    return dict(
        scale=arguments.get("softmax_scale", arguments.get("scale")),
        causal=arguments.get("causal", arguments.get("is_causal", False)),
        window=window,
        softcap=arguments.get("softcap", arguments.get("logits_soft_cap")),
        slopes=arguments.get("alibi_slopes"),
        sinks=arguments.get("s_aux", arguments.get("learnable_sink")),
        query_ends=arguments.get("cu_seqlens_q", arguments.get("cu_seq_q")),
        key_ends=arguments.get("cu_seqlens_k", arguments.get("cu_seq_k")),
        used=arguments.get("seqused_k"),
        pages=arguments.get("page_table"),
    )


def define(namespace: str, signature: str):
    """The operator, and the library that holds it for as long as it is kept."""
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(signature)
    name = signature.partition("(")[0]

    def forward(*args, **kwargs):
        names = [one.name for one in getattr(getattr(torch.ops, namespace), name).default._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        q, k, v = (arguments.get(short, arguments.get(long)) for short, long in zip("qkv", LONG, strict=True))
        return attention(q, k, v, given_of(arguments)), torch.zeros(())

    library.impl(name, forward, "CompositeImplicitAutograd")
    return getattr(getattr(torch.ops, namespace), name), library


LONG = ("query", "key", "value")


def flash_4() -> types.ModuleType:
    """flash-attn 4's module: an autograd function that calls another function of the module."""
    module = types.ModuleType("flash_attn.cute.interface")
    source = """
def _flash_attn_fwd(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False,
        softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None,
        mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None,
        score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None,
        aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None,
        scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False):
    return attention(q, k, v, given_of(dict(locals()))), None

class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal, window_size, learnable_sink, softcap, options):
        return _flash_attn_fwd(q, k, v, softmax_scale=softmax_scale, causal=causal, window_size_left=window_size[0],
            window_size_right=window_size[1], learnable_sink=learnable_sink, softcap=softcap, **options)[0]

def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None,
        softcap=0.0, **options):
    return FlashAttnFunc.apply(q, k, v, softmax_scale, causal, window_size, learnable_sink, softcap, options)
"""
    vars(module).update(torch=torch, attention=attention, given_of=given_of)
    exec(source, vars(module))
    return module


class DotProductAttention(nn.Module):
    """Transformer Engine's module by the signature of 2.10 (`transformer_engine/pytorch/attention`)."""

    def __init__(self, *, qkv_format="sbhd", attn_mask_type="causal", window_size=(-1, -1), scale=None, offset=None):
        super().__init__()
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        self.softmax_offset, self.cp_group = offset, None
        self.flash_attention = types.SimpleNamespace(softmax_scale=scale)

    def forward(
        self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
        attn_mask_type=None, window_size=None, checkpoint_core_attention=False, core_attention_bias_type="no_bias",
        core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True, inference_params=None, pad_between_seqs=None,
        fp8_output=False, num_splits=1,
    ):  # fmt: skip
        sides = query_layer, key_layer, value_layer
        if self.qkv_format == "sbhd":
            sides = [side.transpose(0, 1) for side in sides]
        output = attention(*sides, self.given(cu_seqlens_q, cu_seqlens_kv)).flatten(-2)
        return output.transpose(0, 1) if self.qkv_format == "sbhd" else output

    def given(self, query_ends=None, key_ends=None):
        """What is asked for, in the words of this file; `causal` only for queries and keys of one length."""
        ends = dict(query_ends=query_ends, key_ends=key_ends)
        scale, sinks = self.flash_attention.softmax_scale, self.softmax_offset
        sinks = None if sinks is None else sinks.flatten()
        return dict(scale=scale, causal="causal" in self.attn_mask_type, window=self.window_size, sinks=sinks, **ends)

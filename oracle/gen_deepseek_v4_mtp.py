"""Draft-head oracles for the tiny deepseek_v4 (run gen_deepseek_v4.py first).

(1) legacy one-block MTP ("mtp.0.*" of V4-Flash preview): MTPLX models/deepseek_v4.py:3362-3451, ds4.c:12852-12985.
(2) DSpark (V4-Flash-DSpark / 0731): 3 sliding-window stages, anchor + noise block, Markov and confidence heads, after
    the blueprint of DeepSeek's inference/model.py (warpfront/hipfire design note; popfido's MLX port).
Both are composed from transformers' DeepSeek-V4 modules. fp32, no FP8/FP4 activation round trips."""
import common as C, torch, copy, math
from torch import nn
import torch.nn.functional as F
from transformers import DynamicCache
import transformers.models.deepseek_v4.modeling_deepseek_v4 as M
from safetensors import safe_open
from safetensors.torch import save_file
a = C.args("deepseek_v4"); d = a.out
m = M.DeepseekV4ForCausalLM.from_pretrained(d, dtype=torch.float32, attn_implementation="eager").eval()
cfg = copy.deepcopy(m.config); cfg._attn_implementation = "eager"; cfg._experts_implementation = "eager"
cfg.layer_types = ["sliding_attention"] * 3; cfg.mlp_layer_types = ["moe"] * 3; cfg.num_hidden_layers = 3
H, hc, V = cfg.hidden_size, cfg.hc_mult, cfg.vocab_size
def special(n, t, g):
    if n.endswith("e_score_correction_bias"): return 0.3 * torch.randn(t.shape, generator=g)
    if n.endswith("sinks"): return torch.randn(t.shape, generator=g)
    if n.endswith((".base", "hc_base")): return 0.5 * torch.randn(t.shape, generator=g)
    if n.endswith((".scale", "hc_scale")): return 1 + 0.2 * torch.randn(t.shape, generator=g)
    if n.endswith("markov_w1.weight"): return torch.randn(t.shape, generator=g)
def rope(pos):
    return {"main": m.model.rotary_emb(torch.zeros(1, 1, H), position_ids=pos, layer_type="main")}

ids = safe_open(d + "/golden.safetensors", "pt").get_tensor("input_ids"); N = ids.shape[1]
wide, tap = [], {}
TARGET = [2, 3, 4]
hs = [m.model.hc_head.register_forward_pre_hook(lambda mod, i: wide.append(i[0].clone()))]
for i in TARGET:
    hs.append(m.model.layers[i].register_forward_hook(lambda mod, x, o, i=i: tap.__setitem__(i, o.clone())))
with torch.no_grad():
    lg = m(input_ids=ids, use_cache=False).logits
for h in hs: h.remove()
W = wide[0]; nxt = torch.cat([ids[:, 1:], lg[:, -1:].argmax(-1)], 1)
out = {"hc_hidden": W, "next_ids": nxt}


class Mtp(nn.Module):
    def __init__(s):
        super().__init__()
        s.enorm = M.DeepseekV4RMSNorm(H, eps=cfg.rms_norm_eps); s.hnorm = M.DeepseekV4RMSNorm(H, eps=cfg.rms_norm_eps)
        s.e_proj = nn.Linear(H, H, bias=False); s.h_proj = nn.Linear(H, H, bias=False)
        s.block = M.DeepseekV4DecoderLayer(cfg, 0)
        s.norm = M.DeepseekV4RMSNorm(H, eps=cfg.rms_norm_eps); s.hc_head = M.DeepseekV4HyperHead(cfg)

    def forward(s, h, tok, cache):
        x = s.e_proj(s.enorm(m.model.embed_tokens(tok)))[:, :, None] + s.h_proj(s.hnorm(h))
        S = tok.shape[1]; past = cache.get_seq_length(); pos = (past + torch.arange(S))[None]
        kvl = min(past, cfg.sliding_window - 1) + S
        kpos = torch.arange(past + S - kvl, past + S)[None]
        ok = (kpos <= pos.T) & (kpos > pos.T - cfg.sliding_window)
        mask = torch.where(ok, 0.0, torch.finfo(torch.float32).min)[None, None]
        x = s.block(x, input_ids=tok, position_embeddings=rope(pos), position_ids=pos, attention_mask=mask, cache=cache)
        return x, m.lm_head(s.norm(s.hc_head(x)))


mtp = Mtp().eval(); C.randomise(mtp, 78, special)
with torch.no_grad():
    cache = DynamicCache(config=cfg)
    hid, ml = mtp(W, nxt, cache)
    out.update({"mtp.prefill.hidden": hid, "mtp.prefill.logits": ml})
    prev, dr, ch = hid[:, -1:], [ml[:, -1].argmax(-1)], [ml[:, -1]]
    for k in range(3):
        prev, l = mtp(prev, dr[-1][None], cache); ch.append(l[:, -1]); dr.append(l[:, -1].argmax(-1))
    out["mtp.chain.logits"] = torch.stack(ch, 1); out["mtp.drafts"] = torch.stack(dr, 1)

# ---------------------------------------------------------------- DSpark
BS, NOISE, RANK, WIN = 5, V - 1, 12, cfg.sliding_window
class Stage(nn.Module):
    def __init__(s, i):
        super().__init__()
        s.block = M.DeepseekV4DecoderLayer(cfg, i)
        if i == 0:
            s.main_proj = nn.Linear(H * len(TARGET), H, bias=False); s.main_norm = M.DeepseekV4RMSNorm(H, eps=cfg.rms_norm_eps)
        if i == 2:
            s.norm = M.DeepseekV4RMSNorm(H, eps=cfg.rms_norm_eps); s.hc_head = M.DeepseekV4HyperHead(cfg)
            s.markov_w1 = nn.Embedding(V, RANK); s.markov_w2 = nn.Linear(RANK, V, bias=False)
            s.confidence_proj = nn.Linear(H + RANK, 1, bias=False)

    def main_kv(s, main_x, pos):
        at = s.block.self_attn; cos, sin = rope(pos)["main"]
        return M.apply_rotary_pos_emb(at.kv_norm(at.kv_proj(main_x))[:, None], cos, sin)[:, 0]     # [1,S,hd]

    def attn(s, x, p, window):           # x [1,BS,H]; p = position of the last committed row; window [1,<=WIN,hd]
        at = s.block.self_attn; pos = (p + 1 + torch.arange(BS))[None]; cos, sin = rope(pos)["main"]
        q = at.q_b_proj(at.q_a_norm(at.q_a_proj(x))).view(1, BS, at.num_heads, at.head_dim).transpose(1, 2)
        q = M.apply_rotary_pos_emb(at.q_b_norm(q), cos, sin)
        kv = M.apply_rotary_pos_emb(at.kv_norm(at.kv_proj(x))[:, None], cos, sin)
        K = torch.cat([window[:, None], kv], 2)                                   # every slot sees window + whole block
        sc = torch.matmul(q, K.transpose(2, 3)) * at.scaling
        sc = torch.cat([sc, at.sinks.view(1, -1, 1, 1).expand(1, -1, BS, 1)], -1).softmax(-1)[..., :-1]
        o = torch.matmul(sc, K).transpose(1, 2)
        o = M.apply_rotary_pos_emb(o.transpose(1, 2), cos, -sin).transpose(1, 2)
        return at.o_b_proj(at.o_a_proj(o.reshape(1, BS, cfg.o_groups, -1)).flatten(2))

    def forward(s, x, p, window):
        b = s.block
        post, comb, c = b.attn_hc(x); y = s.attn(b.input_layernorm(c), p, window)
        x = post[..., None] * y[:, :, None] + torch.matmul(comb.transpose(-1, -2), x)
        post, comb, c = b.ffn_hc(x); y = b.mlp(b.post_attention_layernorm(c))
        return post[..., None] * y[:, :, None] + torch.matmul(comb.transpose(-1, -2), x)


st = nn.ModuleList([Stage(i) for i in range(3)]).eval(); C.randomise(st, 79, special)
with torch.no_grad():
    main_hidden = torch.cat([tap[i].mean(2) for i in TARGET], -1)                   # mean over the 4 streams, layer OUTPUTS
    main_x = st[0].main_norm(st[0].main_proj(main_hidden))
    out["dspark.main_hidden"] = main_hidden; out["dspark.main_x"] = main_x
    for tag, p in (("a", N - 1), ("b", 20)):   # p: last position processed by the target; anchor = token at p+1
        anchor = nxt[:, p:p + 1]
        blk = torch.cat([anchor, torch.full((1, BS - 1), NOISE)], 1)
        x = m.model.embed_tokens(blk)[:, :, None].expand(1, BS, hc, H).contiguous()
        for i, s in enumerate(st):
            lo = max(0, p + 1 - WIN)
            win = s.main_kv(main_x[:, lo:p + 1], torch.arange(lo, p + 1)[None])
            x = s(x, p, win); out[f"dspark.{tag}.stage{i}"] = x
        hh = st[2].hc_head(x); base = m.lm_head(st[2].norm(hh))
        prev, toks, cols, em = anchor[:, 0], [], [], []
        for i in range(BS):
            e = st[2].markov_w1(prev); li = base[:, i] + st[2].markov_w2(e)
            cols.append(li); em.append(e); prev = li.argmax(-1); toks.append(prev)
        conf = st[2].confidence_proj(torch.cat([hh, torch.stack(em, 1)], -1)).squeeze(-1)
        out.update({f"dspark.{tag}.block_ids": blk, f"dspark.{tag}.base_logits": base, f"dspark.{tag}.logits": torch.stack(cols, 1),
                    f"dspark.{tag}.drafts": torch.stack(toks, 1), f"dspark.{tag}.confidence_logit": conf, f"dspark.{tag}.p": torch.tensor([p])})
save_file({k: v.detach().contiguous().clone() for k, v in out.items()}, d + "/golden_mtp.safetensors")

from deepseek_names import published
def export(mods, path):
    w = {}
    for pre, state in mods:
        for k, v in published({"x." + k.removeprefix("block."): v for k, v in state.items()}).items():
            k = k.removeprefix("x.").replace("hc_head.hc_", "hc_head_").replace("markov_w", "markov_head.markov_w")
            w[pre + k.replace("confidence_proj", "confidence_head.proj")] = v
    save_file(w, path)
export([("mtp.0.", mtp.state_dict())], d + "/mtp_legacy.safetensors")
export([(f"mtp.{i}.", s.state_dict()) for i, s in enumerate(st)], d + "/dspark.safetensors")
print("mtp drafts", out["mtp.drafts"].tolist(), "dspark a", out["dspark.a.drafts"].tolist(), "b", out["dspark.b.drafts"].tolist())

"""The names that people give parameters, and the role that each name means.

Must not know a function.
"""

from __future__ import annotations

import re

# Role -> names of parameters that have it, in lower case without underscores.
NAMES = {
    "query": "q query queries querys xq qs qin qq queryseq target tgt inputsq inputq latents "
    "fromtensor question",
    "key": "k key keys xk ks kin keyseq",
    "key_t": "kt ktransposed keytransposed keyst keyt transposedkey transposedkeys",
    "value": "v value values val vals xv vs vin valueseq",
    "x": "x xs input inputs hiddenstates hiddenstate hidden embeddings embedding tokens sequence "
    "src emb embeds inputembeds seq xin inp features feats data xt resid "
    "residstream residualstream",
    "context": "context memory encoderhiddenstates kv encoderoutput encoderoutputs encoded y ctx "
    "encoderstates encoderout encout enc memories source cond inputskv inputkv xkv kvinput "
    "crossstates other contextstates mem keyvalue keyvaluestates totensor xa encoderfeatures audio "
    "audiofeatures imagefeatures textstates contextembeddings sources mems media mediafeatures "
    "visualfeatures visualtokens imagetokens imageembeds imageembeddings visionfeatures "
    "imgfeatures regionfeatures visualstates passage passages mdata",
    "mask": "mask attnmask attentionmask m masks causalmask srcmask tgtmask trgmask selfmask "
    "lookaheadmask attnmasks amask",
    "key_mask": "keypaddingmask paddingmask padmask keymask srckeypaddingmask kvmask memorymask "
    "tokenmask seqmask sequencemask inputmask keypadmask kpm passagemask contextmask docmask "
    "sourcemask encodermask encmask encmasks contextpaddingmask keypadding srckeypadding",
    "key_hide": "pad padding ispad ispadding padded padtokens paddings iskeypad keyispad padtoken "
    "memorypad memorypadding srcpad srcpadding sourcepad contextpad contextpadding encpad "
    "encoderpad",
    "key_keep": "keyisreal isreal real valid isvalid validkeys keyvalid nonpad notpad keyvisible "
    "realtokens validmask istoken realkeys keykeep keepkeys live alive",
    "lengths": "lengths lens validlens validlen validlength validlengths seqlens seqlengths kvlens "
    "keylens keylengths kvlengths length nvalid numvalid actuallengths kvseqlens cachelens "
    "sizes bagsizes nframes numframes nreal nnodes counts cacheseqlens contextlens contextlengths "
    "memorylengths memorylens srclengths srclens srclen sourcelen enclen enclens memlens "
    "seqlensk sequsedk encoderlengths encodedlengths "
    "sourcelengths ntokens numtokens nregions numregions nwords numwords nobjects "
    "numobjects nboxes",
    "keep": "keep attend visible keepmask allowed attendmask cansee see allow",
    "hide": "hide ignore hidemask ignoremask blocked forbidden disallowed future",
    "bias": "bias attnbias attentionbias additivemask scorebias relbias relposbias positionbias "
    "relativepositionbias relativebias logitbias pairbias biases rpb",
    "sink": "sink sinks s saux attnsink attnsinks sinklogit sinklogits attentionsinks sinkscores",
    "softcap": "softcap cap logitcap softcapping softcapvalue logitsoftcap logitssoftcap "
    "attnlogitsoftcap attnlogitssoftcap attnlogitsoftcapping attnsoftcap tanhcap",
    "causal": "causal iscausal usecausalmask autoregressive masked usecausal isdecoder",
    "scale": "scale scaling scalefactor smscale softmaxscale",
    "before_softmax": "querypreattnscalar preattnscalar querypreattentionscalar",
    "heads": "h heads numheads nheads nhead numberofheads headcount nh numhead numattentionheads "
    "nq nqheads noheads numqueryheads qheads nheadq numqheads hq attentionheads nattnheads",
    "key_heads": "numkvheads nkvheads kvheads numkeyvalueheads nkvhead hkv numgroups ngroups "
    "numquerygroups nheadskv groups nkv nkvh kvh nlocalheads nlocalkvheads nlocal",
    "width": "dk d dim dhead headdim dimk width headsize dimhead dimperhead headwidth keydim",
    "model": "dmodel embeddim hiddensize modeldim hiddendim nembd embdim modelsize",
    "window": "window ws windowsize slidingwindow localwindow attentionwindow radius "
    "onesidedwindow back nback behind "
    "halfwindow windowradius halfwidth bandwidth left leftwindow windowleft lookback",
    "block": "block blocksize chunk chunksize tile tilesize blockq blockk blockkv chunkq chunkk bq "
    "bk br bc blockm blockn kvchunk qchunk keychunksize querychunksize kvblock qblock nchunks "
    "numchunks nsplits numsplits slicesize nblocks numblocks splits querychunk keychunk chunklen "
    "chunklength blocklen blocksizeq blocksizek qblocksize kvblocksize kvchunksize qchunksize",
    "cache": "cache kvcache past pastkv pastkeyvalue pastkeyvalues layerpast state carry prevkv "
    "incrementalstate savedstate layercache decodingstate runstate",
    "cache_k": "pastk kcache cachek keycache pastkey pastkeys kpast prevk cachedk cachedkeys",
    "cache_v": "pastv vcache cachev valuecache pastvalue pastvalues vpast prevv cachedv "
    "cachedvalues",
    "pos": "pos position startpos offset cachepos step startposition",
    "positions": "segmentpos positionids positions posids inputpos tokenpositions cacheposition",
    "cos": "cos rotarycos ropecos freqscos cosines costable coscached cosine",
    "sin": "sin rotarysin ropesin freqssin sines sintable sincached sine",
    "no": "dropout dropoutp pdropout dropoutrate pdrop training train istraining attndropout "
    "dropoutprob",
    "keeps": "usecache returncache returnkv returnpresent",
    "yes": "deterministic needweights returnweights returnattention returnattn outputattentions",
    "borders": "cuseqlens cuseqlen cuseqlensq culens cu culengths culen cuq seqstarts starts "
    "boundaries borders cumlens cumseqlens indptr offsets qindptr docstarts",
    "key_borders": "cuseqlensk cuseqlenskv cuk cukv kvindptr",
    "segments": "decodersegmentids segmentids segids segid docids docid documentids sequenceids "
    "seqids segments "
    "batchidx batchindex batchids batchvec packids sampleids episodeids segmentid qsegmentids docs "
    "qsegids seg documents graphids",
    "key_segments": "kvsegmentids ksegmentids kvsegids ksegids",
    "longest": "maxseqlen maxseqlenq maxseqlenk maxseqlenkv maxseqlens maxlen maxlength maxs maxq "
    "maxk",
    "sharpness": "logitscale logitscales logtau logtemperature",
    "prefix": "prefixlen prefixlens prefixlength prefixlengths prefix prefixsize",
    "beams": "beamidx beamindices beamids beamorder beamindex neworder reorder parentbeams "
    "parentbeam beamparents srcbeams sourcebeams beamsrc beams beamperm",
    "prompt": "promptlen promptlength nprompt numprompt promptsize promptlens prefilllen "
    "prefilllength prefillsize nprefill numprefill prefill prefilltokens prompttokens",
    "layer": "module layer attnmodule attnlayer attentionmodule",
    "distances": "posemb posembs posembed posembedding posembeddings relpos relposemb relposenc "
    "relativepositions relativepositionembeddings posenc posencoding rpos",
    "turned_share": "rotarypct rotarypercent ropepct partialrotaryfactor rotaryfraction",
    "turned": "rotarydim rotarydims rotdim rotdims ropedim rotaryndims nrot",
    "layer_number": "layeridx layerindex layerid layernumber layeri li",
    "none": "rng prngkey dropoutrng dropoutkey generator",
    "grouped": "enablegqa gqa",
}
for _part in "qkvo":
    _word = {"q": "query", "k": "key", "v": "value", "o": "output"}[_part]
    NAMES[f"W_{_part}"] = " ".join(
        f"w{name} w{name}s {name}weight {name}weights weight{name} weights{name} {name}proj "
        f"{name}w {name}projection {name}matrix {name}linear proj{name} fc{name} linear{name} "
        f"lin{name} {name}lin to{name} proj{name}s {name}dense dense{name} {name}layer {name}map"
        for name in (
            _part,
            _word,
            *(("out", "0", "project", "proj", "dense") if _part == "o" else (f"{_word}s",)),
            *(("ke", "kcontent") if _part == "k" else ()),  # as Transformer-XL's
        )
    )
    NAMES[f"b_{_part}"] = " ".join(
        f"b{name} {name}bias bias{name}"
        for name in (_part, _word, *(("out", "proj", "dense") if _part == "o" else ()))
    )
# What backward passes take besides. A function is one if it needs the first of them.
BACKWARD_NAMES = {
    "d_output": "doutput doutputs dout douts do gradoutput gradoutputs gradout grad grads g gout "
    "dy upstream upstreamgrad upstreamgradient outputgrad outgrad gradient gradients dz cotangent "
    "ct dcontext dattn dattnoutput dldo dldout dloss dlossdo dlossdout go gradientoutput dres",
    "output": "o out output outputs attnout attnoutput attentionoutput y context",
    "lse": "lse l logsumexp softmaxlse logsum logz",
    "weights": "p att weights attn attention probs attnweights attentionweights attnprobs a w "
    "probabilities",
    "delta": "delta deltas rowdot di",
}
BACKWARD_ROLE_OF = {name: role for role, names in BACKWARD_NAMES.items() for name in names.split()}
_ROLE_OF = {name: role for role, names in NAMES.items() for name in names.split()}
# Words around q, k, v, x and others that say nothing about the role: k_new, query_states, q_heads.
_AROUND = re.compile(
    r"_?(new|next|cur|curr|current|states|state|tensor|vectors|vector|vec|layer|heads|in|seq|arr|"
    r"array|input|proj|token|tokens|step|t|i|all|full)_|"
    r"_(new|next|cur|curr|current|states|state|tensor|vectors|vector|vec|layer|heads|in|seq|arr|"
    r"array|input|token|tokens|step|i|all|full|list)$",
    re.IGNORECASE,
)


def is_upstream(name: str) -> bool:
    """Whether a name is one that people give the gradient of an output."""
    return BACKWARD_ROLE_OF.get(plain(name)) == "d_output"


def role_of(name: str) -> str | None:
    """The role that people mean by a name, or None."""
    role = _ROLE_OF.get(plain(name))
    if role is None and (stripped := _AROUND.sub("", name)) and stripped != name:
        role = _ROLE_OF.get(plain(stripped))
    return role


def plain(name: str) -> str:
    """A name in lower case without underscores."""
    return name.lower().replace("_", "")


# Names of layers that hold all three projections.
PACKED = ("inproj", "cattn", "inprojbias")  # as qkv


def fused_order(name: str) -> str:
    """The projections that lie side by side in a layer: qkv, kv, kqv; or nothing."""
    name = plain(name)
    if name in PACKED or re.sub("(weight|kernel|w)$", "", name) in PACKED:
        return "qkv"
    own = re.sub("^(to|w|fc|lin|linear|c|in|x)", "", name)
    own = re.sub("(proj|projection|lin|linear|weight|kernel|w|layer|net|einsum)$", "", own)
    own = own.replace("query", "q").replace("key", "k").replace("value", "v")
    return own if sorted(own) in (["k", "q", "v"], ["k", "v"], ["q", "k"]) else ""

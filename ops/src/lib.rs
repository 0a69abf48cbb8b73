//! Operations with gradients that candle lacks, each one pass over memory on a CPU or a CUDA device:
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use ops::{backward, cross_entropy, linear, rms_norm};
//!
//! let vars = VarMap::new();
//! let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
//! let (norm, head) = (rms_norm(4, 1e-6, builder.pp("norm"))?, linear(4, 2, builder.pp("head"))?);
//! let (x, classes) = (Tensor::eye(4, DType::F32, &Device::Cpu)?, Tensor::new(&[0u32, 1, 1, 0], &Device::Cpu)?);
//! let loss = cross_entropy(&head.forward(&norm.forward(&x)?)?, &classes, None)?;
//! let grads = backward(&loss)?;
//! assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some()));
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Read it in this order:
//!
//! - [`LayerNorm`], [`softmax`], [`log_softmax`], [`cross_entropy`], [`binary_cross_entropy`] and [`mse`] are fused and have gradients.
//! - [`Linear`], multi-head [`attention`], [`embedding`], [`gelu`] and [`relu`] are one operation each.
//! - [`SelfAttention`] is attention with its projections: PyTorch's, or that of Llama and related models, whose other
//!   layers are [`RmsNorm`], [`Rotary`] embedding, [`swiglu`], [`geglu`] and [`GatedMlp`].
//! - [`QuantizedLinear`](quantized::QuantizedLinear) is a frozen linear layer in 4 or 8 bits.
//! - [`Experts`] are feed-forward layers of which a [`Router`] chooses some for each token.
//! - [`linear_cross_entropy`] is a language model's output layer and loss, without materializing the logits of all
//!   rows at once.
//! - [`linear_log_probs`] is the same without the mean, for losses of whole answers; [`document_sums`] sums over each document.
//! - [`conv2d`] and [`max_pool2d`] have PyTorch's gradients, and their backward is as fast as their forward pass.
//! - [`Dropout`] derives its masks from a seed, so that ranks differ and runs repeat.
//! - [`autocast`] computes matrix products in bf16, with the processor's bf16 instructions where it has them.
//! - [`defer_weights`] runs backward without the weight gradients, and computes those later.
//! - [`recompute`] is activation checkpointing: [`backward`] runs a part of a model again instead of keeping its
//!   intermediate results; [`recompute_cheap`] keeps the results of matrix products.
//! - [`activation_bytes`] returns the bytes that a graph holds for backward, including what operations store
//!   themselves ([`SavedBytes`]).
//! - [`tape`] is backward through candle's graph without tensors of zeros, and how an operation joins it.
#![deny(unsafe_code)]

mod blocks;
#[cfg_attr(not(feature = "cuda"), path = "cuda/absent.rs")]
mod cuda;
mod defer;
mod dense;
mod dropout;
mod dtype;
mod error;
mod graph;
mod kept;
pub mod kernels;
mod lock;
pub mod nf4;
mod op;
mod precision;
mod product;
pub mod quantized;
mod real;
mod recompute;
mod rows;
mod scoped;
mod simd;
pub mod tape;
mod warning;

pub use defer::{DeferredGrads, defer, defer_weights};
pub use dropout::Dropout;
pub use dtype::wide_dtype;
pub use error::{Error, Result};
pub use graph::activation_bytes;
pub use kept::SavedBytes;
pub use op::{
    AttentionConfig, AttentionMask, DividedExperts, EXPERT_CORRECTION, Expert, ExpertAdapter, ExpertExchange,
    ExpertWeight, Experts, Gate, GatedMlp, LayerNorm, Linear, LinearCrossEntropyConfig, RmsNorm, Rotary,
    RotaryConfig, RotaryLayout, RotaryScaling, RouteRecord, Router, Routes, RowsOnTheWay, Scoring,
    SelfAttention, attention, attention_with_key_mask, binary_cross_entropy, cast, columns, conv2d,
    correction_moves, cross_entropy, embedding, experts, gated_mlp, geglu, geglu_tanh, gelu, layer_norm,
    linear, linear_cross_entropy, linear_log_probs, linear_no_bias, log_softmax, max_pool2d, mse,
    multihead_attention, relu, rms_norm, scale_rows, self_attention, sigmoid, softmax, swiglu,
};
pub use precision::{Precision, autocast};
pub use recompute::{
    PartMember, backward, drawn, kept_result, recompute, recompute_cheap, recomputed_node, runs_in_part,
};
pub use rows::{
    Balance, BalanceConfig, BalanceLoss, DividedRows, DocumentPlace, Documents, Pair, PairResult,
    PendingExchange, PendingSum, PreferenceConfig, PreferenceLoss, Preferences, RankSum, RowContext,
    RowExchange, RowKeys, document_sums,
};

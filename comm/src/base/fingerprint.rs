//! Fingerprint of a call, which ranks exchange before any data: if two ranks' fingerprints differ, their programs do
//! not make the same calls.

use std::fmt;

use candle_core::DType;
use serde::{Deserialize, Deserializer, Serialize};
use sha2::{Digest, Sha256};

use crate::ReduceOp;

/// Bytes of an encoded fingerprint.
pub(crate) const LEN: usize = 32;
const MAGIC: [u8; 4] = *b"GRF1";
/// Mask of the bits of a digest that are kept.
const DETAIL_MASK: u64 = (1 << 40) - 1;
const NO_REDUCE: u8 = u8::MAX;
/// Set in the byte of the kind if a carrier moves the data.
const CARRIED: u8 = 0x80;
const NO_ROOT: u32 = u32::MAX;

/// The kind of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum CallKind {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    Gather,
    Scatter,
    AllToAll,
    Barrier,
    /// Point-to-point. Both sides announce `Message`, so that a send and its receive match.
    Message,
}

const KINDS: [(CallKind, &str); 10] = [
    (CallKind::AllReduce, "all_reduce"),
    (CallKind::Reduce, "reduce"),
    (CallKind::Broadcast, "broadcast"),
    (CallKind::AllGather, "all_gather"),
    (CallKind::ReduceScatter, "reduce_scatter"),
    (CallKind::Gather, "gather"),
    (CallKind::Scatter, "scatter"),
    (CallKind::AllToAll, "all_to_all"),
    (CallKind::Barrier, "barrier"),
    (CallKind::Message, "message"),
];
const REDUCES: [(ReduceOp, &str); 5] = [
    (ReduceOp::Sum, "sum"),
    (ReduceOp::Avg, "avg"),
    (ReduceOp::Product, "product"),
    (ReduceOp::Min, "min"),
    (ReduceOp::Max, "max"),
];
const DTYPES: [(DType, &str); 7] = [
    (DType::F64, "f64"),
    (DType::F32, "f32"),
    (DType::F16, "f16"),
    (DType::BF16, "bf16"),
    (DType::U8, "u8"),
    (DType::U32, "u32"),
    (DType::I64, "i64"),
];

/// The call that a rank makes. It must be equal on all ranks that take part, or the call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Fingerprint {
    /// Number of the call: of the group's collectives from 1, or of the messages from one rank to another.
    pub(crate) sequence: u64,
    pub(crate) kind: CallKind,
    /// Index into [`REDUCES`].
    #[serde(deserialize_with = "reduce_index")]
    reduce: Option<u8>,
    /// Index into [`DTYPES`].
    #[serde(deserialize_with = "dtype_index")]
    dtype: Option<u8>,
    /// The root of a rooted collective; the sender of a message.
    pub(crate) root: Option<u32>,
    /// Number of elements of the tensor: of the smaller one if there are two, of all parts together if they are uneven.
    pub(crate) elements: u64,
    /// The data is moved by a carrier and not over the links, see [`crate::transport::carrier`].
    carried: bool,
    /// A digest of what else must agree, see [`digest`]; 0 if there is nothing.
    detail: u64,
}

fn reduce_index<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u8>, D::Error> {
    index_below(REDUCES.len(), Option::deserialize(deserializer)?)
}

fn dtype_index<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u8>, D::Error> {
    index_below(DTYPES.len(), Option::deserialize(deserializer)?)
}

/// Checks an index received from another rank before it is used.
fn index_below<E: serde::de::Error>(len: usize, index: Option<u8>) -> Result<Option<u8>, E> {
    match index {
        Some(index) if usize::from(index) >= len => Err(E::custom("an entry that no table has")),
        _ => Ok(index),
    }
}

impl Fingerprint {
    pub(crate) fn new(kind: CallKind, sequence: u64) -> Self {
        Self { sequence, kind, reduce: None, dtype: None, root: None, elements: 0, carried: false, detail: 0 }
    }

    /// `dtype` must be one that [`supports`] accepts; any other is encoded as none.
    pub(crate) fn tensor(self, dtype: DType, elements: usize) -> Self {
        Self { dtype: position(&DTYPES, &dtype), elements: elements as u64, ..self }
    }

    pub(crate) fn elements(self, elements: usize) -> Self {
        Self { elements: elements as u64, ..self }
    }

    pub(crate) fn reduce(self, op: ReduceOp) -> Self {
        Self { reduce: position(&REDUCES, &op), ..self }
    }

    pub(crate) fn root(self, root: usize) -> Self {
        Self { root: Some(root as u32), ..self }
    }

    /// `digest` is a value returned by [`digest`].
    pub(crate) fn detail(self, digest: u64) -> Self {
        Self { detail: digest & DETAIL_MASK, ..self }
    }

    /// Marks the call as one whose data a carrier moves.
    pub(crate) fn carried(self) -> Self {
        Self { carried: true, ..self }
    }

    pub(crate) fn is_carried(&self) -> bool {
        self.carried
    }

    pub(crate) fn is_message(&self) -> bool {
        self.kind == CallKind::Message
    }

    pub(crate) fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = position(&KINDS, &self.kind).unwrap_or(!CARRIED) | if self.carried { CARRIED } else { 0 };
        bytes[5] = self.reduce.unwrap_or(NO_REDUCE);
        bytes[6] = self.dtype.unwrap_or(u8::MAX);
        // Five bytes, in the two gaps between the other fields.
        let detail = self.detail.to_le_bytes();
        bytes[7] = detail[4];
        bytes[12..16].copy_from_slice(&detail[..4]);
        bytes[8..12].copy_from_slice(&self.root.unwrap_or(NO_ROOT).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..].copy_from_slice(&self.elements.to_le_bytes());
        bytes
    }

    /// Returns `None` if these bytes are no encoded fingerprint.
    pub(crate) fn decode(bytes: &[u8; LEN]) -> Option<Self> {
        let byte = |at: usize, len: usize| match bytes[at] {
            u8::MAX => Some(None),
            index if usize::from(index) < len => Some(Some(index)),
            _ => None,
        };
        let (a, b, c) = (&bytes[8..12], &bytes[16..24], &bytes[24..]);
        let root = u32::from_le_bytes(a.try_into().ok()?);
        let decoded = Self {
            sequence: u64::from_le_bytes(b.try_into().ok()?),
            kind: KINDS.get(usize::from(bytes[4] & !CARRIED))?.0,
            reduce: byte(5, REDUCES.len())?,
            dtype: byte(6, DTYPES.len())?,
            root: (root != NO_ROOT).then_some(root),
            elements: u64::from_le_bytes(c.try_into().ok()?),
            carried: bytes[4] & CARRIED != 0,
            detail: u64::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15], bytes[7], 0, 0, 0]),
        };
        (decoded.encode() == *bytes).then_some(decoded)
    }
}

/// Returns a 40-bit digest of a list of numbers, never 0. Two different lists have the same one with a probability of
/// 2^-40.
pub fn digest(numbers: impl IntoIterator<Item = usize>) -> u64 {
    let mut hash = Sha256::new();
    numbers.into_iter().for_each(|number| hash.update((number as u64).to_le_bytes()));
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize()[..8]);
    // Not 0, which means that there is no digest.
    (u64::from_le_bytes(first) & DETAIL_MASK).max(1)
}

/// Returns a number for each dtype that can be sent.
pub(crate) fn dtype_number(dtype: DType) -> usize {
    position(&DTYPES, &dtype).map_or(usize::MAX, usize::from)
}

/// Whether tensors of this dtype can be sent.
pub(crate) fn supports(dtype: DType) -> bool {
    position(&DTYPES, &dtype).is_some()
}

fn position<T: PartialEq>(table: &[(T, &str)], wanted: &T) -> Option<u8> {
    table.iter().position(|(entry, _)| entry == wanted).map(|index| index as u8)
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = KINDS.iter().find(|(kind, _)| *kind == self.kind).map_or("?", |(_, name)| name);
        write!(f, "{name} #{}", self.sequence)?;
        let mut details = Vec::new();
        if let Some(root) = self.root {
            let what = if self.is_message() { "from rank" } else { "root" };
            details.push(format!("{what} {root}"));
        }
        details.extend(self.reduce.map(|index| REDUCES[usize::from(index)].1.to_string()));
        if let Some(index) = self.dtype {
            details.push(DTYPES[usize::from(index)].1.into());
            // For an all-to-all with counts, the fingerprint has no element count.
            if self.kind != CallKind::AllToAll || self.elements > 0 {
                details.push(format!("{} elements", self.elements));
            }
        }
        details.extend(self.carried.then(|| "by the back end's library".into()));
        if self.detail != 0 {
            details.push(format!("sizes with check sum {:010x}", self.detail));
        }
        if details.is_empty() { Ok(()) } else { write!(f, " ({})", details.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_digest_depends_on_every_number_and_on_their_order() {
        let lists: [&[usize]; 6] = [&[], &[0], &[0, 0], &[1, 2], &[2, 1], &[1, 2, 0]];
        let mut digests: Vec<u64> = lists.iter().map(|list| digest(list.iter().copied())).collect();
        assert!(digests.iter().all(|digest| (1..=DETAIL_MASK).contains(digest)));
        digests.sort_unstable();
        digests.dedup();
        assert_eq!(digests.len(), lists.len());
    }

    #[test]
    fn reads_like_the_call() {
        let call = Fingerprint::new(CallKind::AllReduce, 17).reduce(ReduceOp::Sum).tensor(DType::F32, 1024);
        assert_eq!(call.to_string(), "all_reduce #17 (sum, f32, 1024 elements)");
        let call = Fingerprint::new(CallKind::Broadcast, 3).root(0).tensor(DType::BF16, 10);
        assert_eq!(call.to_string(), "broadcast #3 (root 0, bf16, 10 elements)");
        assert_eq!(Fingerprint::new(CallKind::Barrier, 1).to_string(), "barrier #1");
    }

    proptest! {
        #[test]
        fn survives_encoding(kind in 0..KINDS.len(), reduce in 0..REDUCES.len(), dtype in 0..DTYPES.len(),
                             root in 0..1000usize, sequence: u64, elements in 0..usize::MAX, detail: u64) {
            let call = Fingerprint::new(KINDS[kind].0, sequence)
                .reduce(REDUCES[reduce].0).tensor(DTYPES[dtype].0, elements).root(root).detail(detail);
            prop_assert_eq!(Fingerprint::decode(&call.encode()), Some(call));
            let carried = call.carried();
            prop_assert_eq!(Fingerprint::decode(&carried.encode()), Some(carried));
            prop_assert_ne!(carried, call);
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes: [u8; LEN]) {
            if let Some(call) = Fingerprint::decode(&bytes) {
                prop_assert_eq!(call.encode(), bytes);
                let _ = call.to_string();
            }
        }
    }
}

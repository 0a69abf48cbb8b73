//! Attention of rows that are divided over ranks: a rank's queries see the keys of all ranks.
//!
//! The keys and values of one rank after the other arrive while those of the one before are computed with. Each gives a part of
//! the result, with the logarithms of its sums of exponentials, by which parts are weighed. Backward goes the same way, and
//! sends the gradients of keys and values back.

use std::iter::zip;
use std::ops::Range;
use std::sync::Mutex;

use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Shape, Tensor, bail};

use super::{AttentionCall, AttentionMask, NAME, Sizes};
use crate::dense::with_numbers;
use crate::lock::lock;
use crate::product::Accumulator;
use crate::real::{Real, ln};
use crate::recompute::{copied, keep_results, known_results};
use crate::{DividedRows, Error, PendingExchange, Result, SavedBytes, tape};

/// Which keys of one rank the queries of a rank see.
#[derive(Debug, Clone)]
pub(super) struct SeenPart {
    /// For each query of each batch row, the range of the part's keys that it sees.
    ranges: Vec<Range<u32>>,
    /// The places of queries and of keys in the row, and its length.
    queries: Vec<u32>,
    keys: Vec<u32>,
    len: usize,
}

impl SeenPart {
    pub(super) fn range(&self, query: usize) -> Range<usize> {
        let Range { start, end } = self.ranges[query];
        start as usize..end as usize
    }

    /// Both ends of the ranges ascend within a row, also those of empty ones.
    pub(super) fn union(&self, queries: Range<usize>) -> Range<usize> {
        match queries.is_empty() {
            true => 0..0,
            false => self.range(queries.start).start..self.range(queries.end - 1).end,
        }
    }

    /// The place of a query in the row.
    pub(super) fn query(&self, at: usize) -> usize {
        self.queries[at] as usize
    }

    /// The place of a key in the row.
    pub(super) fn key(&self, at: usize) -> usize {
        self.keys[at] as usize
    }

    /// Number of places of the row.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

/// Attention with the keys of all ranks. The tensors are contiguous, on a CPU, and were of `dtype` before, in which they are sent.
pub(super) fn attention(
    [q, k, v]: [&Tensor; 3],
    dtype: DType,
    call: &AttentionCall,
    rows: &DividedRows,
) -> candle_core::Result<Tensor> {
    let hidden = call.hidden.as_deref().map(|own| hidden_of_all(own, call.sizes, rows)).transpose()?;
    let ring = Ring::new(call, hidden.as_deref(), rows, dtype);
    let known = known_results();
    let [mixed, log_sums] = match known.as_deref() {
        Some([mixed, log_sums]) if mixed.dims() == q.dims() => [mixed.clone(), log_sums.clone()],
        _ => match q.dtype() {
            DType::F32 => ring.forward::<f32>([q, k, v])?,
            _ => ring.forward::<f64>([q, k, v])?,
        },
    };
    keep_results(|| Ok(vec![mixed.copy()?, log_sums.clone()]))?;
    let (bytes, kept) = (log_sums.elem_count() * log_sums.dtype().size_in_bytes(), SavedBytes::default());
    let op = Divided { ring, log_sums, result: Mutex::new(Some(mixed)), kept: kept.clone() };
    let mixed = tape::apply_op3(q, k, v, op)?;
    kept.by(&mixed, bytes);
    Ok(mixed)
}

/// For each place of the whole rows, whether its key is hidden.
fn hidden_of_all(own: &[bool], sizes: Sizes, rows: &DividedRows) -> candle_core::Result<Vec<bool>> {
    let own: Vec<u8> = own.iter().map(|hidden| u8::from(*hidden)).collect();
    let own = Tensor::from_vec(own, (sizes.batch, sizes.keys), &Device::Cpu)?;
    Ok(rows.whole_of(&own)?.flatten_all()?.to_vec1::<u8>()?.into_iter().map(|hidden| hidden != 0).collect())
}

/// Refuses what rows that are divided cannot have.
pub(super) fn check(call: &AttentionCall, on_cpu: bool, rows: &DividedRows) -> Result<()> {
    let unfit = |problem: String| Err(Error::UnfitDivision { operation: NAME, problem });
    let (queries, keys, own) = (call.sizes.queries, call.sizes.keys, rows.places().len());
    match call.mask {
        _ if queries != own || keys != own => {
            unfit(format!("{queries} queries and {keys} keys: give those of this rank's {own} places"))
        }
        _ if !on_cpu => {
            unfit("context parallelism (cp) computes attention on a CPU only; use the device cpu".into())
        }
        AttentionMask::AntiCausal => unfit("AttentionMask::AntiCausal; use another mask".into()),
        _ => Ok(()),
    }
}

/// The exchange of keys and values: in step `s` a rank gets those of the rank `s` before it.
#[derive(Debug)]
struct Ring {
    rows: DividedRows,
    dtype: DType,
    /// The calls of the steps, and the keys of the other rank that they are with.
    calls: Vec<(AttentionCall, Range<usize>)>,
    /// This rank's keys that the rank `s` after it sees.
    sent: Vec<Range<usize>>,
}

/// Two tensors on their way, `None` if there is nothing to receive.
struct Arriving {
    exchange: Box<dyn PendingExchange>,
    pair: Option<[Tensor; 2]>,
}

impl Arriving {
    fn wait(self) -> candle_core::Result<Option<[Tensor; 2]>> {
        self.exchange.wait()?;
        Ok(self.pair)
    }
}

impl Ring {
    /// `hidden` is of all places of the rows.
    fn new(call: &AttentionCall, hidden: Option<&[bool]>, rows: &DividedRows, dtype: DType) -> Self {
        let (rank, ranks) = (rows.rank(), rows.ranks());
        let calls = (0..ranks).map(|step| {
            let from = (rank + ranks - step) % ranks;
            let (ranges, keys) = seen(call, rows, rank, from);
            let places: Vec<u32> = rows.places_of(from)[keys.clone()].into();
            let hidden = hidden.map(|hidden| {
                let of_rows = hidden.chunks(rows.len());
                of_rows.flat_map(|row| places.iter().map(|place| row[*place as usize])).collect()
            });
            let part = SeenPart { ranges, queries: rows.places().into(), keys: places, len: rows.len() };
            (call.of_part(part, hidden), keys)
        });
        let calls = calls.collect();
        let sent = (0..ranks).map(|step| seen(call, rows, (rank + step) % ranks, rank).1).collect();
        Self { rows: rows.clone(), dtype, calls, sent }
    }

    /// Begins to send a pair to the rank `to` steps after this one, and to receive one of `places` places from the rank `from`
    /// steps after it.
    fn exchange(
        &self,
        to: usize,
        pair: Option<[Tensor; 2]>,
        from: usize,
        places: usize,
        (batch, width, dtype): (usize, usize, DType),
    ) -> candle_core::Result<Arriving> {
        let ranks = self.rows.ranks();
        let [to, from] = [to, from].map(|steps| (self.rows.rank() + steps) % ranks);
        let room = || Tensor::zeros((batch, places, width), dtype, &Device::Cpu);
        let arriving = if places > 0 { Some([room()?, room()?]) } else { None };
        let tensors = |pair: &Option<[Tensor; 2]>| pair.iter().flatten().cloned().collect();
        let exchange = self.rows.exchange().begin((to, tensors(&pair)), (from, tensors(&arriving)))?;
        Ok(Arriving { exchange, pair: arriving })
    }

    /// Begins to exchange the keys and values of a step; `None` after the last.
    fn keys_of(&self, step: usize, own: [&Tensor; 2]) -> candle_core::Result<Option<Arriving>> {
        let Some((_, keys)) = self.calls.get(step) else { return Ok(None) };
        let (batch, _, width) = own[0].dims3()?;
        let sent = &self.sent[step];
        let part = |x: &Tensor| {
            x.detach().narrow(1, sent.start, sent.len())?.to_dtype(self.dtype)?.force_contiguous()
        };
        let pair = if sent.is_empty() { None } else { Some([part(own[0])?, part(own[1])?]) };
        let from = self.rows.ranks() - step;
        self.exchange(step, pair, from, keys.len(), (batch, width, self.dtype)).map(Some)
    }

    /// Calls `each` for each step, with the keys and values that this rank sees in it; its own come first. The next ones arrive
    /// meanwhile.
    fn for_each(
        &self,
        own: [&Tensor; 2],
        mut each: impl FnMut(usize, Option<[&Tensor; 2]>) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        let wide = own[0].dtype();
        let mut next = self.keys_of(1, own)?;
        each(0, Some(own))?;
        for step in 1..self.calls.len() {
            let pair = next.take().map(Arriving::wait).transpose()?.flatten();
            next = self.keys_of(step + 1, own)?;
            match pair {
                Some([k, v]) => each(step, Some([&k.to_dtype(wide)?, &v.to_dtype(wide)?]))?,
                None => each(step, None)?,
            }
        }
        Ok(())
    }

    /// Returns the result, and for each head and query the logarithm of its sum of exponentials.
    fn forward<T: Accumulator>(&self, [q, k, v]: [&Tensor; 3]) -> candle_core::Result<[Tensor; 2]> {
        let sizes = self.calls[0].0.sizes;
        let mut whole: Option<(Vec<T>, Vec<T>)> = None;
        self.for_each([k, v], |step, pair| {
            let (Some([k, v]), call) = (pair, &self.calls[step].0) else { return Ok(()) };
            let part =
                with_numbers(q, |q| with_numbers(k, |k| with_numbers(v, |v| call.forward([q, k, v]))))?;
            match &mut whole {
                None => whole = Some(part),
                Some(whole) => sizes.merge(whole, &part),
            }
            Ok(())
        })?;
        let Some((mixed, log_sums)) = whole else { bail!("{NAME}: no keys") };
        let of_heads = (sizes.batch, sizes.heads, sizes.queries);
        Ok([
            Tensor::from_vec(mixed, q.shape(), &Device::Cpu)?,
            Tensor::from_vec(log_sums, of_heads, &Device::Cpu)?,
        ])
    }

    /// Returns the gradients of this rank's queries, keys and values.
    fn backward<T: Accumulator>(
        &self,
        [q, k, v]: [&Tensor; 3],
        [mixed, gradient, log_sums]: [&Tensor; 3],
    ) -> candle_core::Result<[Tensor; 3]> {
        let ((batch, _, width), ranks) = (k.dims3()?, self.rows.ranks());
        let (mut own, mut returning) = (None::<[Vec<T>; 3]>, Vec::new());
        self.for_each([k, v], |step, pair| {
            let call = &self.calls[step].0;
            let gradients = |[k, v]: [&Tensor; 2]| {
                with_numbers(log_sums, |sums| call.gradients::<T>([q, k, v, mixed, gradient], sums))
            };
            let found = pair.map(gradients).transpose()?;
            let Some([of_q, _, _]) = &mut own else {
                own = found;
                return Ok(());
            };
            let mut pair = None;
            if let Some([q, k, v]) = found {
                add(of_q, &q);
                let of_keys = |x| Tensor::from_vec(x, (batch, call.sizes.keys, width), &Device::Cpu);
                pair = Some([of_keys(k)?, of_keys(v)?]);
            }
            // What is sent in a step comes back from where it was sent to.
            let places = self.sent[step].len();
            returning
                .push((step, self.exchange(ranks - step, pair, step, places, (batch, width, T::DTYPE))?));
            Ok(())
        })?;
        let Some([of_q, mut of_k, mut of_v]) = own else { bail!("{NAME}: no keys") };
        for (step, arriving) in returning {
            let Some(pair) = arriving.wait()? else { continue };
            for (whole, arrived) in zip([&mut of_k, &mut of_v], &pair) {
                with_numbers(arrived, |arrived| {
                    let Range { start, end } = self.sent[step];
                    let rows = whole.chunks_mut(self.rows.places().len() * width);
                    for (whole, arrived) in zip(rows, arrived.chunks((end - start) * width)) {
                        add(&mut whole[start * width..end * width], arrived);
                    }
                    Ok(())
                })?;
            }
        }
        let like = |numbers, like: &Tensor| Tensor::from_vec(numbers, like.shape(), &Device::Cpu);
        Ok([like(of_q, q)?, like(of_k, k)?, like(of_v, v)?])
    }
}

fn add<T: Real>(whole: &mut [T], part: &[T]) {
    zip(whole, part).for_each(|(whole, part)| *whole += *part);
}

/// For each query of rank `of`, in each row of the batch, which keys of rank `from` it sees, as a range of those that any of them
/// sees; and these.
fn seen(call: &AttentionCall, rows: &DividedRows, of: usize, from: usize) -> (Vec<Range<u32>>, Range<usize>) {
    let (queries, keys, len) = (rows.places_of(of), rows.places_of(from), rows.len());
    let index = |place: usize| keys.partition_point(|key| (*key as usize) < place);
    let ranges = (0..call.sizes.batch).flat_map(|row| {
        queries.iter().map(move |place| {
            let place = *place as usize;
            let places = call.mask.seen(place, call.document(row, place, len));
            index(places.start)..index(places.end)
        })
    });
    let ranges: Vec<Range<usize>> = ranges.collect();
    let found = ranges.iter().filter(|range| !range.is_empty());
    let start = found.clone().map(|range| range.start).min().unwrap_or(0);
    let all = start..found.map(|range| range.end).max().unwrap_or(0);
    let within = |place: usize| (place.clamp(all.start, all.end) - all.start) as u32;
    (ranges.iter().map(|range| within(range.start)..within(range.end)).collect(), all)
}

impl AttentionCall {
    /// The call with the keys of one rank.
    fn of_part(&self, part: SeenPart, hidden: Option<Vec<bool>>) -> Self {
        let Self { sizes, mask, scale, dropout, how, .. } = self;
        let sizes = Sizes { keys: part.keys.len(), ..*sizes };
        Self {
            sizes,
            mask: *mask,
            scale: *scale,
            hidden,
            documents: None,
            dropout: dropout.clone(),
            part: Some(part),
            how: *how,
        }
    }
}

impl Sizes {
    /// Adds the result of other keys to a result, each weighed by its sums of exponentials.
    fn merge<T: Real>(self, (mixed, log_sums): &mut (Vec<T>, Vec<T>), (part, of_part): &(Vec<T>, Vec<T>)) {
        let Self { queries, heads, dims, .. } = self;
        for (at, (mixed, part)) in zip(mixed.chunks_mut(dims), part.chunks(dims)).enumerate() {
            let (row, head) = (at / heads, at % heads);
            let place = (row / queries * heads + head) * queries + row % queries;
            let (own, other) = (log_sums[place], of_part[place]);
            if other == T::NEG_INFINITY {
                continue;
            }
            let top = if own > other { own } else { other };
            let (of_own, of_other) = ((own - top).exp_nonpositive(), (other - top).exp_nonpositive());
            let total = of_own + of_other;
            log_sums[place] = top + ln(total);
            let (of_own, of_other) = (of_own / total, of_other / total);
            zip(mixed, part).for_each(|(mixed, part)| *mixed = of_own * *mixed + of_other * *part);
        }
    }
}

/// The operation in the graph. Its result exists before it is applied.
struct Divided {
    ring: Ring,
    result: Mutex<Option<Tensor>>,
    /// For each head and query the logarithm of its sum of exponentials.
    log_sums: Tensor,
    #[expect(dead_code, reason = "releases its count when dropped")]
    kept: SavedBytes,
}

impl CustomOp3 for Divided {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let result = lock(&self.result).take();
        let Some(result) = result else { bail!("{NAME}: the result was taken before") };
        copied(&result)
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mixed: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (inputs, gradient) = ([q, k, v], gradient.contiguous()?);
        let of_result = [mixed, &gradient, &self.log_sums];
        let [of_q, of_k, of_v] = match q.dtype() {
            DType::F32 => self.ring.backward::<f32>(inputs, of_result)?,
            _ => self.ring.backward::<f64>(inputs, of_result)?,
        };
        Ok((Some(of_q), Some(of_k), Some(of_v)))
    }
}

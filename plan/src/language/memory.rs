//! Memory per rank, by kind. Compared with what ranks hold in `plan/tests/held.rs`, and with the peak of an allocator in
//! `plan/tests/peak.rs`.

use candle_core::DType;
use girandole::Layout;
use girandole::ops::Precision;
use training::build::Recompute;

use super::outline::{Parameter, Unit};
use super::partition::PartitionedModel;
use crate::compare::Memory;
use crate::optimizer::Optimizer;

/// Number of tensors alive in an addition by candle's backward: zeros, the addend, and the result.
const ADDITION_TENSORS: f64 = 3.0;

/// Bytes held from step to step.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PersistentBytes {
    pub(super) parameters: f64,
    /// As passed to the optimizer, at the end of a step.
    pub(super) gradients: f64,
    pub(super) optimizer: f64,
    /// Copies of parameters that exist all the time.
    pub(super) copies: f64,
}

/// Bytes held temporarily, at one moment of a step.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct TemporaryBytes {
    pub(super) activations: f64,
    /// Accumulated gradients, and everything else.
    pub(super) others: f64,
}

impl TemporaryBytes {
    pub(super) fn new(activations: f64, others: f64) -> Self {
        Self { activations, others }
    }

    fn total(&self) -> f64 {
        self.activations + self.others
    }
}

impl PersistentBytes {
    /// Returns the memory at the moment that needs most. The moment's `others` include gradients; what exceeds the
    /// gradients that the optimizer is passed counts as buffers.
    pub(super) fn with(self, moments: impl IntoIterator<Item = TemporaryBytes>) -> Memory {
        let Self { parameters, gradients, optimizer, copies } = self;
        let most = moments.into_iter().max_by(|a, b| a.total().total_cmp(&b.total()));
        let TemporaryBytes { activations, others } = most.unwrap_or_default();
        Memory {
            parameters,
            gradients,
            optimizer,
            activations,
            buffers: copies + (others - gradients).max(0.0),
        }
    }
}

impl PartitionedModel<'_> {
    /// Returns the bytes that forward keeps per token in a block.
    pub(super) fn kept_of(&self, block: usize) -> usize {
        match self.training.recompute {
            _ if !self.recomputes(block) => self.kept.block(&self.units[block]),
            Recompute::Selective => self.kept.products(&self.units[block]),
            _ => self.kept.output(),
        }
    }

    /// Returns the bytes of optimizer state for so many parameters, some of them `hidden` matrices; the optimizer also keeps what a
    /// parameter of 16 bits has no room for. Groups of `far` also keep where each parameter was after their last average, and the outer
    /// momentum.
    pub(super) fn optimizer(&self, elements: f64, hidden: f64) -> f64 {
        let low_bits = self.working() - self.element();
        let saved = if self.training.optimizer == Optimizer::Muon { hidden * self.working() } else { 0.0 };
        let numbers = self.training.optimizer.numbers() + if self.layout.far > 1 { 2 } else { 0 };
        (numbers as f64 * self.working() + low_bits) * elements - saved
    }

    /// Returns the step of an optimizer that brings matrices together.
    pub(super) fn optimizer_step(
        &self,
        units: impl IntoIterator<Item = usize>,
        hidden: f64,
        gradients: f64,
    ) -> Option<TemporaryBytes> {
        let bytes = self.bytes_of_matrices(units, hidden);
        (bytes > 0.0).then(|| TemporaryBytes::new(0.0, gradients + bytes))
    }

    fn sum(&self, of: impl Fn(&Unit) -> usize) -> f64 {
        self.units.iter().map(|unit| of(unit) as f64).sum()
    }

    /// Returns the bytes of a unit's parameters.
    pub(super) fn bytes(&self, place: usize) -> f64 {
        let unit = &self.units[place];
        unit.wide_elements() as f64 * self.element() + unit.quantized_bytes() as f64
    }

    fn accumulates(&self) -> bool {
        self.training.micro_batches(&self.layout) > 1
    }

    /// Returns memory without pipeline stages.
    pub(super) fn whole(&self) -> Memory {
        let (Layout { shard, .. }, [_, copies]) = (self.layout, self.holders());
        let sum = |wanted: fn(&Parameter) -> bool| self.sum(|unit| unit.shard_elements(shard, wanted));
        let (all, trained) = (sum(|_| true), sum(|tensor| tensor.is_trained));
        let hidden = sum(Parameter::is_hidden);
        let fixed = PersistentBytes {
            parameters: all * self.element() + self.sum(Unit::quantized_bytes) / shard as f64,
            gradients: trained * self.element(),
            optimizer: self.optimizer(trained, hidden),
            copies: if copies > 1 && shard == 1 { trained * self.element() } else { 0.0 },
        };
        let step = self.optimizer_step(0..self.units.len(), hidden, fixed.gradients);
        if shard > 1 {
            fixed.with(self.sharded().into_iter().chain(step))
        } else {
            fixed.with(self.copied().into_iter().chain(step))
        }
    }

    /// Returns the memory of a forward pass of a model that is not trained, without pipeline stages. Nothing is kept for backward, and
    /// copies of the model are nowhere held twice.
    pub(super) fn pass(&self) -> Memory {
        let Layout { shard, .. } = self.layout;
        let elements = self.sum(|unit| unit.shard_elements(shard, |_| true));
        let fixed = PersistentBytes {
            parameters: elements * self.element() + self.sum(Unit::quantized_bytes) / shard as f64,
            ..PersistentBytes::default()
        };
        let last = self.units.len() - 1;
        let gathered = |place: usize| match shard {
            1 => 0.0,
            _ => self.pool().max(self.gathered(place) + self.gathered((place + 1).min(last))),
        };
        fixed.with((0..=last).map(|place| {
            let TemporaryBytes { activations, others } = self.alone(place);
            TemporaryBytes::new(activations, others + gathered(place))
        }))
    }

    /// Returns the temporary bytes of a unit that computes a micro-batch without backward.
    pub(super) fn alone(&self, place: usize) -> TemporaryBytes {
        let of_tokens = |bytes: usize| bytes as f64 * self.tokens;
        match place {
            0 => TemporaryBytes::new(of_tokens(self.kept.embedding()), 0.0),
            place if self.is_block(place) => {
                TemporaryBytes::new(of_tokens(self.kept.block_alone(&self.units[place])), 0.0)
            }
            _ => TemporaryBytes::new(of_tokens(self.kept.loss_alone()) + self.wide_head(), self.logits()),
        }
    }

    /// Returns the bytes of gather buffers, which the next units use again: those of the largest two units.
    fn pool(&self) -> f64 {
        let mut largest: Vec<f64> = (0..self.units.len()).map(|place| self.bytes(place)).collect();
        largest.sort_unstable_by(|a, b| b.total_cmp(a));
        largest.iter().take(2).sum()
    }

    /// Moments if every rank holds all parameters: the loss, backward of the first block, and backward of the
    /// embedding.
    fn copied(&self) -> [TemporaryBytes; 3] {
        let gradients = self.sum(Unit::trained) * self.element();
        let sums = if self.accumulates() { self.summed(gradients) } else { 0.0 };
        // Data-parallel ranks accumulate directly in the buckets that are sent.
        let both = if self.holders()[1] > 1 { gradients } else { sums + gradients };
        let kept = self.activations();
        let kept_on = kept + self.head_gradient() - self.passed_head();
        [
            TemporaryBytes::new(kept, sums + self.loss()),
            TemporaryBytes::new(kept_on + self.again(), both + self.backward()),
            TemporaryBytes::new(kept_on, both + self.embedding()),
        ]
    }

    /// Moments if parameters are gathered unit by unit, and gradients reduced to shards.
    fn sharded(&self) -> Vec<TemporaryBytes> {
        let kept = self.activations();
        let element = self.element();
        let whole = |place: usize| self.gathered(place);
        // In a unit with trained parameters, frozen ones have gradients of zeros, but for those in 4 bits.
        let of_gradients = |place: usize| match self.units[place].trained() {
            0 => 0.0,
            _ => self.units[place].wide_elements() as f64 * element,
        };
        let last = self.units.len() - 1;
        let pool = self.pool();
        // Gradients accumulated without synchronisation stay whole until their unit is reduced.
        let mut sums: f64 = if self.accumulates() { (0..=last).map(of_gradients).sum() } else { 0.0 };
        let first = TemporaryBytes::new(kept, sums + pool.max(whole(last) + whole(last - 1)) + self.loss());
        let mut moments = vec![first];
        if self.accumulates() {
            moments.push(TemporaryBytes::new(kept + self.again(), sums + pool + self.backward()));
        }
        let (mut divided, mut leaving) = (0.0, 0.0);
        for place in (0..=last).rev() {
            let next = place.checked_sub(1).map_or(0.0, whole);
            let again = if self.recomputes(place) { self.block_again(place) } else { 0.0 };
            let fresh = of_gradients(place);
            divided += fresh / self.layout.shard as f64;
            let others = match place {
                0 => self.embedding(),
                place if place == last => 0.0,
                _ => self.backward(),
            };
            let gathered = pool.max(whole(place) + next);
            let others = sums.max(fresh) + divided + leaving + gathered + others;
            moments.push(TemporaryBytes::new(kept + again, others));
            sums = (sums - fresh).max(0.0);
            leaving = fresh;
        }
        moments
    }

    /// Returns the bytes gathered to compute a unit: a tied head also needs the embedding.
    fn gathered(&self, place: usize) -> f64 {
        let own = self.bytes(place);
        match self.is_tied && place + 1 == self.units.len() {
            true => own + self.bytes(0),
            false => own,
        }
    }

    /// Returns the temporary bytes of the loss, forward or backward, with the head's gradient.
    fn loss(&self) -> f64 {
        self.head_gradient() + self.loss_forward().max(self.loss_backward())
    }

    /// Returns the bytes of activations of a micro-batch.
    fn activations(&self) -> f64 {
        let boundary = if self.layout.shard > 1 { self.kept.output() } else { 0 };
        let of_unit = |place: usize| match place {
            0 => self.kept.embedding() + boundary,
            place if !self.is_block(place) => self.kept.loss(),
            place => self.kept_of(place) + boundary,
        };
        let kept: usize = (0..self.units.len()).map(of_unit).sum();
        kept as f64 * self.tokens + self.wide_head()
    }

    fn is_narrow(&self) -> bool {
        self.element() != self.working()
    }

    /// Returns the bytes of the 32-bit copy of a 16-bit head.
    fn wide_head(&self) -> f64 {
        let is_widened = self.is_narrow() && self.layout.tp == 1 && !self.scores_documents();
        if is_widened { self.vocabulary * self.working() } else { 0.0 }
    }

    /// Returns the bytes of the head's gradient, in 32 bits, which the loss computes in forward.
    fn head_gradient(&self) -> f64 {
        let head = if self.is_tied { self.units.first() } else { self.units.last() };
        let is_trained = head.is_some_and(|unit| unit.trained() > 0);
        if is_trained && self.layout.tp == 1 { self.head * self.working() } else { 0.0 }
    }

    /// Returns the bytes that the loss keeps for its backward, whatever the number of tokens.
    pub(super) fn kept_head(&self) -> f64 {
        self.wide_head() + self.head_gradient()
    }

    /// Returns the bytes of what the loss has kept that are the head's gradient after its backward. In 16 bits, that is
    /// another tensor.
    pub(super) fn passed_head(&self) -> f64 {
        if self.is_narrow() { 0.0 } else { self.head_gradient() }
    }

    /// Returns the bytes of sums of gradients of so many bytes: those of 16 bits are summed in 32 bits.
    pub(super) fn summed(&self, gradients: f64) -> f64 {
        gradients / self.element() * self.working()
    }

    /// Returns the bytes of the largest gradient in 32 bits, to be added to sums of 16-bit gradients.
    pub(super) fn largest_in_32_bits(&self, units: Vec<usize>) -> f64 {
        if !self.is_narrow() {
            return 0.0;
        }
        let tensors = units.into_iter().flat_map(|place| &self.units[place].tensors);
        let trained = tensors.filter(|tensor| tensor.is_trained);
        trained.map(|tensor| tensor.elements as f64 * self.working()).fold(0.0, f64::max)
    }

    /// Returns the bytes that the largest recomputed block keeps during its backward.
    fn again(&self) -> f64 {
        let again = (0..self.units.len()).filter(|place| self.recomputes(*place));
        again.map(|place| self.block_again(place)).fold(0.0, f64::max)
    }

    pub(super) fn block_again(&self, place: usize) -> f64 {
        let all = self.kept.block(&self.units[place]) + self.kept.output();
        // What forward kept already exists, except for the block's input, which is copied.
        let known = self.kept_of(place) - self.kept.output();
        (all - known) as f64 * self.tokens
    }

    /// Returns the temporary bytes of a block's backward.
    pub(super) fn backward(&self) -> f64 {
        self.kept.backward() as f64 * self.tokens
    }

    /// Returns the temporary bytes of the embedding's backward: the gradient of a tied head that is added to, or candle's
    /// zeros and addend in 16 bits or where the vocabulary is divided. With `pp` a tied head has a table of its own.
    pub(super) fn embedding(&self) -> f64 {
        let is_trained = self.units.first().is_some_and(|unit| unit.trained() > 0);
        let is_added = self.is_tied && self.layout.pp == 1;
        let times = match self.is_narrow() {
            true => ADDITION_TENSORS - 1.0,
            false => f64::from(u8::from(is_added) + u8::from(self.layout.tp > 1)),
        };
        if is_trained { times * self.vocabulary * self.element() } else { 0.0 }
    }

    /// Returns the temporary bytes of the loss's forward, which computes the head's gradient, too.
    pub(super) fn loss_forward(&self) -> f64 {
        let logits = self.logits();
        // A processor without bf16 products multiplies a rounded copy.
        let is_rounded = self.training.dtype == DType::BF16 && Precision::Bf16.rounds_copies();
        logits + if is_rounded { logits } else { self.packed(logits) }
    }

    /// Returns the bytes of the logits that the loss has at a time: without tensor parallelism those of some rows.
    fn logits(&self) -> f64 {
        /// Bytes of logits computed at a time.
        const CHUNK_BYTES: f64 = (64 << 20) as f64;
        if self.layout.tp > 1 || self.scores_documents() {
            return 0.0;
        }
        let row = self.classes * self.working();
        self.tokens.min((CHUNK_BYTES / row).floor().max(1.0)) * row
    }

    /// Returns the temporary bytes of the loss's backward: gradients of all of this rank's logits, or of a 16-bit head.
    pub(super) fn loss_backward(&self) -> f64 {
        // In 16 bits candle's backward of the conversion to 32 bits holds a second gradient of 32 bits, and zeros, addend
        // and sum of 16 bits.
        let converted = if self.is_narrow() { 1.0 + ADDITION_TENSORS / 2.0 } else { 0.0 };
        if self.scores_documents() {
            // The gradient of the norm's output, of which the documents' places are cut.
            return ADDITION_TENSORS * self.kept.output() as f64 * self.tokens;
        }
        if self.layout.tp > 1 {
            let own = (self.classes / self.layout.tp as f64).ceil() * self.working() * self.tokens;
            return (1.0 + converted) * own + self.packed(own);
        }
        converted * self.head_gradient()
    }

    /// Returns the bytes that the head's product with a matrix of so many bytes packs at a time: none if the head is
    /// narrow.
    fn packed(&self, bytes: f64) -> f64 {
        /// About as many as an L3 cache has.
        const MOST: f64 = (8 << 20) as f64;
        const NARROW: f64 = 48.0;
        let width = self.kept.output() as f64 / self.element();
        if width > NARROW { bytes.min(MOST) } else { 0.0 }
    }
}

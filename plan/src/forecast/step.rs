//! Simulation of a training step.

use pipeline::{Durations, Result, Schedule};
use serde::{Deserialize, Serialize};

use super::{Collective, Collectives, Layer, Layout, Network, Sharding, Work};

/// Forecast of a training step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Seconds of a step.
    pub step_s: f64,
    /// Seconds of these in which a rank computes: mean over ranks.
    pub compute_s: f64,
    /// Bytes that a rank holds for parameters, gradients and optimizer state, without activations: maximum over ranks.
    pub state_bytes: f64,
}

/// Predicts the time of a step. Times in `work` are those of one micro-batch of one data-parallel rank.
///
/// # Errors
/// Those of [`Schedule::of`]: a pipeline of no stages or micro-batches.
pub fn predict(work: &Work, layout: &Layout, network: &Network) -> Result<Prediction> {
    predict_with(work, layout, &mut Collectives::new(network))
}

/// As [`predict`], reusing the times of collectives that were computed before.
///
/// # Errors
/// As [`predict`].
pub fn predict_with(work: &Work, layout: &Layout, collectives: &mut Collectives<'_>) -> Result<Prediction> {
    if layout.pp > 1 {
        return pipelined(work, layout, collectives);
    }
    let mut run = Run { work, layout, collectives, now: 0.0, network_free: 0.0, computed: 0.0 };
    match layout.sharding {
        Sharding::Over(_) => run.fsdp(),
        Sharding::None if layout.tp > 1 => run.divided(),
        Sharding::None => run.copied(),
    }
    let own = work.parameters() as f64 / (layout.tp * layout.shards().ranks) as f64;
    run.compute(work.optimizer_s * own);
    Ok(Prediction { step_s: run.now, compute_s: run.computed, state_bytes: Work::bytes(own) })
}

/// Simulation of one rank, which stands for all: its computation and the concurrent communication.
struct Run<'a, 'b, 'c> {
    work: &'a Work,
    layout: &'a Layout,
    collectives: &'b mut Collectives<'c>,
    now: f64,
    network_free: f64,
    computed: f64,
}

impl Run<'_, '_, '_> {
    fn compute(&mut self, seconds: f64) {
        self.now += seconds;
        self.computed += seconds;
    }

    /// Starts a collective now, after those before it, and returns when it is done. Without overlap, the rank waits for
    /// it.
    fn submit(&mut self, seconds: f64) -> f64 {
        self.network_free = self.network_free.max(self.now) + seconds;
        if !self.collectives.network().overlaps {
            self.now = self.network_free;
        }
        self.network_free
    }

    fn wait(&mut self, until: f64) {
        self.now = self.now.max(until);
    }

    fn forward(&mut self) {
        for layer in &self.work.layers {
            self.compute(layer.forward_s);
        }
    }

    /// `ddp`: gradients in buckets, each sent when it is full, starting with the last layers.
    fn copied(&mut self) {
        self.forward();
        let (mut waiting, mut first) = (0, true);
        let buckets = ddp::DdpConfig::default();
        for layer in self.work.layers.iter().rev() {
            self.compute(layer.backward_s);
            waiting += layer.parameters * self.work.element_bytes;
            let full = if first {
                buckets.first_bucket_bytes.min(self.layout.bucket_bytes)
            } else {
                self.layout.bucket_bytes
            };
            if waiting >= full {
                self.average(std::mem::take(&mut waiting));
                first = false;
            }
        }
        self.average(waiting);
        self.wait(self.network_free);
    }

    /// Starts to average gradients over replicas, in buckets.
    fn average(&mut self, bytes: usize) {
        let group = self.layout.copies();
        let buckets = bytes.div_ceil(self.layout.bucket_bytes.max(1)).max(1);
        // A parameter larger than a bucket would have its own; layers here have several parameters, and are divided
        // evenly.
        for _ in 0..buckets {
            let seconds = self.collectives.seconds(Collective::AllReduce, group, bytes / buckets);
            self.submit(seconds);
        }
    }

    /// `fsdp`: a unit is gathered while the one before it computes, and its gradients are reduced while the next one
    /// computes.
    fn fsdp(&mut self) {
        let (shards, copies) = (self.layout.shards(), self.layout.copies());
        let layers = &self.work.layers;
        let mut gathered = self.gather(0);
        for (place, layer) in layers.iter().enumerate() {
            self.wait(gathered);
            gathered = if place + 1 < layers.len() { self.gather(place + 1) } else { self.now };
            self.compute(layer.forward_s / self.layout.tp as f64);
            self.now += reductions(self.layout, self.collectives, &layer.forward_reductions);
        }
        let stays = self.layout.stays_gathered;
        let mut gathered = if stays { self.now } else { self.gather(layers.len() - 1) };
        let mut divided = 0.0;
        for (place, layer) in layers.iter().enumerate().rev() {
            self.wait(gathered);
            gathered = if place > 0 && !stays { self.gather(place - 1) } else { self.now };
            self.compute(layer.backward_s / self.layout.tp as f64);
            self.now += reductions(self.layout, self.collectives, &layer.backward_reductions);
            let parameters = layer.parameters / self.layout.tp;
            let divide = (Collective::ReduceScatter, shards, parameters * self.work.gathered_bytes);
            let average =
                (Collective::AllReduce, copies, parameters / shards.ranks * self.work.element_bytes);
            let seconds =
                [divide, average].map(|(what, group, bytes)| self.collectives.seconds(what, group, bytes));
            let seconds = seconds.iter().sum();
            let before = std::mem::replace(&mut divided, self.submit(seconds));
            // At most two units have whole gradients at a time.
            self.wait(before);
        }
        self.wait(divided);
    }

    fn gather(&mut self, place: usize) -> f64 {
        let seconds = gather(&self.work.layers[place], self.work, self.layout, self.collectives);
        self.submit(seconds)
    }

    /// `tensor-parallel`: blocking all-reduces between the layers; at the end gradients are averaged over replicas.
    fn divided(&mut self) {
        let seconds = divided(self.work, self.layout, self.collectives);
        for [computed, communicated] in seconds {
            self.compute(computed);
            self.now += communicated;
        }
        let own = self.work.parameters() / self.layout.tp * self.work.element_bytes;
        self.now += self.collectives.seconds(Collective::AllReduce, self.layout.copies(), own);
    }
}

impl Layout {
    /// Returns the seconds to gather all layers twice, for forward and backward.
    pub(crate) fn gathers(&self, work: &Work, collectives: &mut Collectives<'_>) -> f64 {
        2.0 * work.layers.iter().map(|layer| gather(layer, work, self, collectives)).sum::<f64>()
    }
}

fn gather(layer: &Layer, work: &Work, layout: &Layout, collectives: &mut Collectives<'_>) -> f64 {
    let bytes = layer.parameters / layout.tp * work.gathered_bytes;
    collectives.seconds(Collective::AllGather, layout.shards(), bytes)
}

/// Returns the seconds of a divided layer's all-reduces of these sizes. With sequence parallelism, each is an
/// all-gather and a reduce-scatter.
fn reductions(layout: &Layout, collectives: &mut Collectives<'_>, sizes: &[usize]) -> f64 {
    let parts: &[Collective] = match layout.sequence_parallel {
        true => &[Collective::AllGather, Collective::ReduceScatter],
        false => &[Collective::AllReduce],
    };
    let group = layout.tensor_group();
    let each = sizes.iter().flat_map(|bytes| parts.iter().map(move |part| (*part, *bytes)));
    each.map(|(part, bytes)| collectives.seconds(part, group, bytes)).sum()
}

/// Returns the seconds of computation and of reductions of all layers, forward and backward, for a rank of a
/// tensor-parallel group.
fn divided(work: &Work, layout: &Layout, collectives: &mut Collectives<'_>) -> [[f64; 2]; 2] {
    let (mut forward, mut backward) = ([0.0; 2], [0.0; 2]);
    let mut reduce = |sizes: &[usize]| reductions(layout, collectives, sizes);
    for layer in &work.layers {
        forward =
            [forward[0] + layer.forward_s / layout.tp as f64, forward[1] + reduce(&layer.forward_reductions)];
        backward = [
            backward[0] + layer.backward_s / layout.tp as f64,
            backward[1] + reduce(&layer.backward_reductions),
        ];
    }
    [forward, backward]
}

/// `pipeline`: its own schedule, with stages that take equally long; then gradients are averaged over replicas.
fn pipelined(work: &Work, layout: &Layout, collectives: &mut Collectives<'_>) -> Result<Prediction> {
    let &Layout { pp, schedule, micro_batches, .. } = layout;
    let stages_per_rank = schedule.stages_per_rank();
    let stages = (pp * stages_per_rank) as f64;
    let [forward, backward] = divided(work, layout, collectives);
    let link = collectives.network().link(0, layout.tp * layout.dp);
    let message = work.layers.first().map_or(0, |layer| layer.output_bytes);
    let durations = Durations {
        forward: (forward[0] + forward[1]) / stages,
        backward_input: (backward[0] / 2.0 + backward[1]) / stages,
        backward_weight: backward[0] / 2.0 / stages,
        message: link.seconds(message as f64),
    };
    let plan = Schedule::of(schedule, pp, stages_per_rank, micro_batches)?.plan(&durations);
    let own = work.parameters() as f64 / (pp * layout.tp) as f64;
    let average =
        collectives.seconds(Collective::AllReduce, layout.copies(), own as usize * work.element_bytes);
    let optimizer = work.optimizer_s * own;
    let computed = (forward[0] + backward[0]) / pp as f64 * micro_batches as f64 + optimizer;
    Ok(Prediction {
        step_s: plan.makespan() + average + optimizer,
        compute_s: computed,
        state_bytes: Work::bytes(own),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forecast::{Link, Transformer};

    const MODEL: Transformer =
        Transformer { vocab_size: 1000, d_model: 64, d_ff: 256, num_layers: 8, length: 32 };

    fn slow(overlaps: bool) -> Network {
        Network::one_node("slow", Link { latency: 1e-5, s_per_byte: 1e-9 }, 0.0, overlaps)
    }

    fn step(layout: &Layout, network: &Network) -> f64 {
        predict(&Work::measured(&MODEL, 4, [0.01, 0.02, 0.001]), layout, network).unwrap().step_s
    }

    #[test]
    fn one_rank_only_computes() {
        for layout in [Layout::ddp(1), Layout::fsdp(1), Layout::tensor(1, 1), Layout::pipeline(1, 1, 1, 1)] {
            assert!((step(&layout, &slow(true)) - 0.031).abs() < 1e-12, "{layout:?}");
        }
    }

    #[test]
    fn a_network_without_cost_costs_nothing() {
        let free = Network::one_node("free", Link::default(), 0.0, false);
        assert!((step(&Layout::ddp(16), &free) - 0.031).abs() < 1e-12);
        assert!((step(&Layout::fsdp(16), &free) - 0.030 - 0.001 / 16.0).abs() < 1e-12);
        assert!((step(&Layout::tensor(4, 4), &free) - 0.031 / 4.0).abs() < 1e-12);
        // (M + P - 1) / M times a stage's time for all micro-batches.
        let pipeline = step(&Layout::pipeline(4, 1, 1, 8), &free);
        assert!((pipeline - 11.0 * 0.030 / 4.0 - 0.001 / 4.0).abs() < 1e-9, "{pipeline}");
    }

    #[test]
    fn overlap_hides_what_fits_into_backward() {
        let layout = Layout { bucket_bytes: 256 << 10, ..Layout::ddp(8) };
        let (hidden, plain) = (step(&layout, &slow(true)), step(&layout, &slow(false)));
        let work = Work::measured(&MODEL, 4, [0.01, 0.02, 0.001]);
        let sent = 2.0 * 7.0 / 8.0 * 4.0 * work.parameters() as f64 * 1e-9;
        assert!(hidden < plain && hidden > 0.031, "{hidden} {plain}");
        assert!(plain > 0.031 + sent && plain < 0.031 + sent + 0.01, "{plain} {sent}");
    }

    #[test]
    fn mixtures_hold_their_share() {
        let work = Work::measured(&MODEL, 4, [0.01, 0.02, 0.001]);
        let bytes = |layout: &Layout| predict(&work, layout, &slow(true)).unwrap().state_bytes;
        let whole = bytes(&Layout::ddp(8));
        assert_eq!(bytes(&Layout::fsdp(8)), whole / 8.0);
        assert_eq!(bytes(&Layout::hybrid(4, 2)), whole / 4.0);
        assert_eq!(bytes(&Layout::tensor(2, 4)), whole / 2.0);
        assert_eq!(bytes(&Layout::pipeline(2, 2, 2, 4)), whole / 4.0);
        assert_eq!(Layout::pipeline(2, 2, 2, 4).ranks(), 8);
    }
}

//! Time of a step in a layout, forecast by [`crate::forecast`]: matrix products and attention, optimizer, and
//! communication.

use girandole::Layout;

use super::outline::{Layer as Outlined, Unit};
use super::partition::{PartitionedModel, owned_units};
use super::{LayoutComparison, LayoutCost, Subject, Training};
use crate::forecast::{
    Collective, Collectives, Group, Layer, Layout as Spread, Sharding, Work, predict_with,
};
use crate::{Hardware, Result};

/// Largest group that is simulated rank by rank; small, because thousands of ranks have hundreds of layouts.
const SIMULATED: usize = 32;

impl Subject {
    /// Returns the seconds of a step in each of the possible layouts, on this hardware.
    ///
    /// # Cost
    /// Each size of a message in each group is simulated once.
    ///
    /// # Errors
    /// A model that cannot be built; a pipeline schedule that is not possible.
    pub fn seconds(
        &self,
        training: &Training,
        compared: &LayoutComparison,
        hardware: &Hardware,
    ) -> Result<Vec<f64>> {
        let mut collectives = Collectives::up_to(&hardware.network, SIMULATED);
        let units = self.units(&Layout::default())?;
        let of = |cost: &LayoutCost| {
            let model = PartitionedModel::new(self, training, &cost.layout)?;
            let divided = match cost.layout.ep {
                1 => None,
                ep => Some(self.units(&Layout { ep, ..Layout::default() })?),
            };
            let held = divided.as_ref().unwrap_or(&units);
            StepTime { model, units: &units, held, hardware }.seconds(&mut collectives)
        };
        compared.costs.iter().map(of).collect()
    }
}

struct StepTime<'a> {
    model: PartitionedModel<'a>,
    /// Units of the whole model.
    units: &'a [Unit],
    /// The same with the experts of one rank.
    held: &'a [Unit],
    hardware: &'a Hardware,
}

impl StepTime<'_> {
    fn seconds(&self, collectives: &mut Collectives<'_>) -> Result<f64> {
        let &PartitionedModel { training, layout, .. } = &self.model;
        let Layout { pp, dp, shard, ep, tp, .. } = layout;
        let micro_batches = training.micro_batches(&layout);
        let sharding = if shard > 1 && pp == 1 { Sharding::Over(shard) } else { Sharding::None };
        let schedule = training.schedule;
        let spread =
            Spread { dp: dp * shard * ep, tp, pp, sharding, schedule, micro_batches, ..Spread::default() };
        let work = self.work(sharding, self.imbalance()?);
        let mut step = predict_with(&work, &spread, collectives)?.step_s;
        if pp > 1 && shard > 1 {
            // A stage's parameters are gathered once a step, and each rank's optimizer has a part of them.
            let own = work.parameters().div_ceil(pp * tp);
            let group = Group { ranks: shard, stride: tp };
            step += collectives.seconds(Collective::AllGather, group, own * work.element_bytes);
            step -= work.optimizer_s * own as f64 * (1.0 - 1.0 / shard as f64);
        }
        step += self.orthogonal()?;
        if pp > 1 || micro_batches < 2 {
            return Ok(step);
        }
        // Micro-batches before the last exchange no gradients, and have no optimizer step.
        let alone = Spread { dp: 1, sharding: Sharding::None, ..spread };
        let frozen = Work { optimizer_s: 0.0, ..work.clone() };
        let before = predict_with(&frozen, &alone, collectives)?.step_s;
        let gathered = match sharding {
            Sharding::None => 0.0,
            Sharding::Over(_) => spread.gathers(&work, collectives),
        };
        let each = if self.hardware.network.overlaps { before.max(gathered) } else { before + gathered };
        Ok(step + each * (micro_batches - 1) as f64)
    }

    fn work(&self, sharding: Sharding, imbalance: f64) -> Work {
        let (element, tokens) = (self.model.training.dtype.size_in_bytes(), self.model.tokens);
        let sum = |of: &dyn Fn(&Unit) -> usize| self.held.iter().map(of).sum::<usize>() as f64;
        // Where nobody else has the same experts, their gradients are not averaged.
        let alone = self.model.layout.ep > 1 && self.model.holders()[0] == 1;
        let averaged = |unit: &Unit| unit.trained() - if alone { unit.trained_experts() } else { 0 };
        let sent = |unit: &Unit| if sharding == Sharding::None { averaged(unit) } else { unit.elements() };
        let (all, trained) = (sum(&sent), sum(&Unit::trained));
        let output_bytes = tokens as usize * self.model.subject.config.hidden_size * element;
        let last = self.units.len() - 1;
        let layer = |(place, unit): (usize, &Unit)| {
            let [forward, backward] = self.flops(place).map(|flops| flops * tokens / self.hardware.flops);
            let again = if self.model.recomputes_products(place) { forward } else { 0.0 };
            // Times are without tensor parallelism; each rank of it exchanges its own heads' keys.
            let [wait_ahead, wait_back] =
                self.waiting(place).map(|seconds| seconds * self.model.layout.tp as f64);
            // All-reduces: a block has one after attention and one after feed-forward; the embedding one forward, the
            // head one backward.
            let [ahead, back] = match place {
                0 => [1, 0],
                place if place == last => [0, 1],
                _ => [2, 2],
            };
            Layer {
                // Frozen parameters are gathered, but their gradients are not averaged.
                parameters: sent(unit),
                forward_s: forward * imbalance + wait_ahead,
                backward_s: (backward + again) * imbalance + wait_back,
                output_bytes,
                forward_reductions: vec![output_bytes; ahead],
                backward_reductions: vec![output_bytes; back],
            }
        };
        let optimizer = self.model.training.optimizer.numbers();
        let optimizer = self.hardware.optimizer_s(optimizer, size_of::<f32>() as u64);
        let share = trained / all.max(1.0);
        let layers = self.held.iter().enumerate().map(layer).collect();
        Work { layers, optimizer_s: optimizer * share, element_bytes: element, gathered_bytes: element }
    }

    /// Returns the seconds that a rank waits in a unit for what others send, forward and backward.
    fn waiting(&self, place: usize) -> [f64; 2] {
        let (keys, rows) = (self.waiting_for_keys(place), self.waiting_for_rows(place));
        [keys[0] + rows[0], keys[1] + rows[1]]
    }

    /// Returns the seconds that a rank of `ep` waits for the rows of tokens, and for their results: of half of them, those on their
    /// way to the experts, what the computation of a shared expert does not hide.
    fn waiting_for_rows(&self, place: usize) -> [f64; 2] {
        let Layout { ep, tp, .. } = self.model.layout;
        let [ahead, back] = self.model.sent_to_experts(place);
        if ahead == 0.0 {
            return [0.0; 2];
        }
        let (network, subject) = (&self.hardware.network, self.model.subject);
        let link = network.link(0, (ep - 1) * tp);
        let seconds = |bytes: f64| link.s_per_byte * bytes + 2.0 * link.latency * (ep - 1) as f64;
        let shared = match network.overlaps {
            true => subject.layer_flops(&self.units[place], Outlined::is_of_shared_expert),
            false => [0.0; 2],
        };
        let [forward, backward] =
            shared.map(|flops| flops * self.model.tokens / self.hardware.flops / tp as f64);
        let hidden = |bytes: f64, computed: f64| computed.min(seconds(bytes) / 2.0);
        // In backward gradients come back, and before them rows go again if their products are recomputed.
        let is_again = self.model.recomputes_products(place);
        let [gradients, again] = if is_again { [back - ahead, hidden(ahead, forward)] } else { [back, 0.0] };
        [seconds(ahead) - hidden(ahead, forward), seconds(back) - hidden(gradients, backward) - again]
    }

    /// Returns the seconds that a rank of `cp` waits for keys and values of others: what the computation of its attention does not
    /// hide.
    fn waiting_for_keys(&self, place: usize) -> [f64; 2] {
        let PartitionedModel { subject, training, layout, cp, tokens, .. } = &self.model;
        let [ahead, back] = self.model.exchanged(place);
        if ahead == 0.0 {
            return [0.0; 2];
        }
        let (network, stride) = (&self.hardware.network, layout.ep * layout.tp);
        let (link, others) = (network.link(0, (cp - 1) * stride), (cp - 1) as f64);
        // In backward gradients go back, too.
        let seconds = |bytes: f64, times: f64| link.s_per_byte * bytes + link.latency * others * times;
        let hidden = match network.overlaps {
            true => subject
                .attention_flops(place, training.attended())
                .map(|flops| flops * tokens / self.hardware.flops / layout.tp as f64),
            false => [0.0; 2],
        };
        [(seconds(ahead, 1.0) - hidden[0]).max(0.0), (seconds(back, 2.0) - hidden[1]).max(0.0)]
    }

    /// Returns the seconds in which the matrices of hidden layers are brought together, made orthogonal and sent back, on the stage
    /// that takes longest: the others wait for it.
    fn orthogonal(&self) -> Result<f64> {
        let Layout { pp, dp, shard, ep, tp, .. } = self.model.layout;
        let (network, ranks) = (&self.hardware.network, dp * shard * ep * tp);
        let link = network.link(0, ranks - 1);
        let of = |units: Vec<usize>| {
            let flops = self.model.orthogonal_flops(units.iter().copied());
            flops / self.hardware.flops + link.s_per_byte * self.model.sent_for_matrices(units)
        };
        if pp < 2 {
            return Ok(of((0..self.units.len()).collect()));
        }
        let (schedule, ranges) = self.model.stages()?;
        Ok((0..pp).map(|rank| of(owned_units(&schedule, &ranges, rank))).fold(0.0, f64::max))
    }

    fn flops(&self, place: usize) -> [f64; 2] {
        self.model.subject.flops(self.units, place, self.model.training.attended())
    }

    /// Returns the computation of the pipeline rank that computes most, relative to the mean: the others wait for it.
    fn imbalance(&self) -> Result<f64> {
        let pp = self.model.layout.pp;
        if pp < 2 {
            return Ok(1.0);
        }
        let (schedule, ranges) = self.model.stages()?;
        let flops = |place: usize| self.flops(place).iter().sum::<f64>();
        let of_rank = |rank| owned_units(&schedule, &ranges, rank).into_iter().map(flops).sum::<f64>();
        let most = (0..pp).map(of_rank).fold(0.0, f64::max);
        let all: f64 = (0..self.units.len()).map(flops).sum();
        Ok(most * pp as f64 / all.max(f64::MIN_POSITIVE))
    }
}

#[cfg(test)]
mod tests {
    use models::ModelConfig;
    use training::build::Recompute;

    use super::*;
    use crate::forecast::{Link, Network};

    fn subject() -> Subject {
        let json = r#"{"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
             "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 64,
             "rms_norm_eps": 1e-5, "initializer_range": 0.1, "tie_word_embeddings": false, "rope_theta": 10000.0}"#;
        Subject::new(ModelConfig::from_json(json).unwrap(), None)
    }

    fn experts() -> Subject {
        of_experts("mixtral", r#""num_local_experts": 8"#)
    }

    fn of_experts(family: &str, own: &str) -> Subject {
        let json = format!(
            r#"{{"model_type": "{family}", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
             "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 64,
             "rms_norm_eps": 1e-5, "initializer_range": 0.1, "num_experts_per_tok": 2, {own}}}"#
        );
        Subject::new(ModelConfig::from_json(&json).unwrap(), None)
    }

    fn seconds(training: &Training, layout: &str, link: Link) -> f64 {
        seconds_of(&subject(), training, layout, link)
    }

    fn seconds_of(subject: &Subject, training: &Training, layout: &str, link: Link) -> f64 {
        let network = Network::one_node("test", link, 0.0, false);
        let hardware = Hardware { network, flops: 1e9, memory_bandwidth: f64::INFINITY };
        let compared = subject.compare(training, &[layout.parse().unwrap()]).unwrap();
        subject.seconds(training, &compared, &hardware).unwrap()[0]
    }

    #[test]
    fn where_nothing_is_sent_ranks_share_the_operations() {
        let training = Training { batch_size: 8, length: 32, ..Training::default() };
        let flops = 8.0 * subject().training_flops(32, 32.0).unwrap() / 1e9;
        for layout in ["dp=1", "dp=4", "shard=4", "tp=4", "dp=2,tp=2", "shard=2,tp=2", "dp=2,shard=2"] {
            let ranks = layout.parse::<Layout>().unwrap().ranks() as f64;
            for micro_batches in [1, 2] {
                let training = Training { micro_batches: Some(micro_batches), ..training.clone() };
                let got = seconds(&training, layout, Link::default());
                assert!((got * ranks / flops - 1.0).abs() < 1e-9, "{layout}: {got}, {flops}");
            }
        }
        // All wait for the largest stage, and for the first and last micro-batches.
        let got = seconds(&training, "pp=2", Link::default());
        assert!(got > flops / 2.0 * 1.2 && got < flops, "{got}, {flops}");
        let again = Training { recompute: Recompute::Units, ..training };
        let got = seconds(&again, "dp=1", Link::default()) / flops;
        assert!(got > 1.15 && got < 1.34, "{got}");
    }

    #[test]
    fn what_is_sent_takes_its_time() {
        let training = Training { batch_size: 8, length: 32, ..Training::default() };
        let link = Link { latency: 0.0, s_per_byte: 1e-8 };
        for layout in [
            "dp=4", "shard=4", "tp=4", "shard=2,tp=2", "pp=2,dp=2", "cp=4", "cp=2,tp=2", "pp=2,cp=2",
            "shard=2,cp=2",
        ] {
            let layout_cost = subject().compare(&training, &[layout.parse().unwrap()]).unwrap();
            let more = seconds(&training, layout, link) - seconds(&training, layout, Link::default());
            let sent = layout_cost.costs[0].sent() * link.s_per_byte;
            assert!(more > 0.5 * sent && more < 2.0 * sent, "{layout}: {more}, {sent}");
        }
    }

    #[test]
    fn rows_for_experts_take_their_time() {
        let (subject, link) = (experts(), Link { latency: 0.0, s_per_byte: 1e-8 });
        let training = Training { batch_size: 8, length: 32, ..Training::default() };
        let flops = 8.0 * subject.training_flops(32, 32.0).unwrap() / 1e9;
        for layout in ["ep=4", "dp=2,ep=2", "shard=2,ep=2", "ep=2,tp=2", "pp=2,ep=2"] {
            let cost = subject.estimate(&training, &layout.parse().unwrap()).unwrap();
            let alone = seconds_of(&subject, &training, layout, Link::default());
            if !layout.contains("pp") {
                assert!((alone * 4.0 / flops - 1.0).abs() < 1e-9, "{layout}: {alone}, {flops}");
            }
            let more = seconds_of(&subject, &training, layout, link) - alone;
            let sent = cost.sent() * link.s_per_byte;
            assert!(more > 0.5 * sent && more < 2.0 * sent, "{layout}: {more}, {sent}");
        }
    }

    /// At most half of the time is hidden, and no more than the shared expert takes; nothing without one, or on a network that does not
    /// work while ranks compute.
    #[test]
    fn rows_go_to_experts_while_a_shared_expert_is_computed() {
        let shared =
            r#""num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48"#;
        let (shared, none) = (of_experts("qwen2_moe", shared), experts());
        let seconds = |subject: &Subject, recompute, (flops, overlaps)| {
            let training = Training { batch_size: 8, length: 32, recompute, ..Training::default() };
            let layout: Layout = "ep=4".parse().unwrap();
            let units = subject.units(&Layout::default()).unwrap();
            let network = Network::one_node("test", Link { latency: 1e-6, s_per_byte: 1e-8 }, 0.0, overlaps);
            let hardware = Hardware { network, flops, memory_bandwidth: f64::INFINITY };
            let model = PartitionedModel::new(subject, &training, &layout).unwrap();
            StepTime { model, units: &units, held: &units, hardware: &hardware }.waiting(1)
        };
        for recompute in [Recompute::None, Recompute::Units] {
            let of = |subject, how| seconds(subject, recompute, how);
            let alone = of(&shared, (1e9, false));
            assert_eq!(of(&none, (1e3, true)), of(&none, (1e9, false)));
            for (hidden, alone) in of(&shared, (1e3, true)).into_iter().zip(alone) {
                assert!((hidden * 2.0 / alone - 1.0).abs() < 0.01, "{recompute:?}: {hidden}, {alone}");
            }
            // 2 rows of 32 tokens; gate, up and down of 48 features, and the gate of the output.
            let forward = 2.0 * 64.0 * (3.0 * 64.0 * 48.0 + 64.0) / 1e12;
            let again = if recompute == Recompute::Units { 1.0 } else { 0.0 };
            let hidden = of(&shared, (1e12, true));
            let expected = [alone[0] - forward, alone[1] - (2.0 + again) * forward];
            for (hidden, expected) in hidden.into_iter().zip(expected) {
                assert!((hidden / expected - 1.0).abs() < 1e-9, "{recompute:?}: {hidden}, {expected}");
            }
        }
    }

    #[test]
    fn keys_arrive_while_attention_is_computed() {
        let training = Training { batch_size: 1, length: 64, ..Training::default() };
        let subject = subject();
        let compared = subject.compare(&training, &["cp=4".parse().unwrap()]).unwrap();
        let units = subject.units(&Layout::default()).unwrap();
        let seconds = |s_per_byte: f64, overlaps: bool| {
            let network = Network::one_node("test", Link { latency: 0.0, s_per_byte }, 0.0, overlaps);
            let hardware = Hardware { network, flops: 1e9, memory_bandwidth: f64::INFINITY };
            let model = PartitionedModel::new(&subject, &training, &compared.costs[0].layout).unwrap();
            StepTime { model, units: &units, held: &units, hardware: &hardware }.waiting(1)
        };
        let [slow, fast] = [1e-6, 1e-12];
        assert_eq!(seconds(fast, true), [0.0; 2]);
        assert!(seconds(fast, false).into_iter().all(|seconds| seconds > 0.0));
        let pairs = seconds(slow, true).into_iter().zip(seconds(slow, false));
        assert!(pairs.into_iter().all(|(hidden, alone)| hidden > 0.0 && hidden < alone));
    }
}

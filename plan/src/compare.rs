//! What is compared: the ranks of a plan, the memory of each, and which strategy or layout is recommended.

use comm::internal::UsableMemory;
use serde::Serialize;

use crate::hardware::Hardware;
use crate::units::{show_bytes, show_time};

/// Candidates within this factor of the fastest count as equally fast; the simplest of them is recommended.
const EQUAL_SPEED_FACTOR: f64 = 1.02;

/// Number of names listed before the rest is only counted.
const MOST_NAMES: usize = 6;

/// Memory of each rank.
#[derive(Debug, Clone, PartialEq)]
pub struct RankMemory {
    /// In bytes.
    pub bytes: f64,
    /// What limits it, to be displayed beside it; empty if nothing but the machine does.
    pub limit: String,
}

impl RankMemory {
    /// Returns the share of one of `ranks` ranks.
    pub(crate) fn share(total: &UsableMemory, ranks: usize) -> Self {
        let bytes = total.bytes as f64;
        let limit = match &total.limit {
            Some(_) => format!("this machine has {}{}", show_bytes(bytes), total.restriction()),
            None => String::new(),
        };
        Self { bytes: bytes / ranks as f64, limit }
    }
}

/// Ranks that a plan is for.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranks {
    /// Their number.
    pub count: usize,
    /// Memory of each.
    pub memory: RankMemory,
    /// Hardware of each.
    pub hardware: Hardware,
    /// Whether some of the hardware's numbers were measured.
    pub measured: bool,
}

/// The ranks' memory and hardware as JSON.
#[derive(Serialize)]
pub(crate) struct JsonRanks {
    /// Bytes per rank.
    memory: f64,
    /// Bytes per second.
    bandwidth: f64,
    /// Seconds.
    latency: f64,
    /// Ranks per node; `None` if all are on one node.
    ranks_per_node: Option<usize>,
    /// Bytes per second between nodes.
    node_bandwidth: f64,
    /// Seconds.
    node_latency: f64,
    /// Operations per second of a rank.
    flops: f64,
    /// Bytes per second that the optimizer reads and writes; `None` if its time is not counted.
    memory_bandwidth: Option<f64>,
}

impl Ranks {
    /// Returns two heading lines: the ranks with their memory, and their hardware.
    pub(crate) fn lines(&self) -> [String; 2] {
        let Self { count, memory: RankMemory { bytes, limit }, hardware, measured } = self;
        let limit = if limit.is_empty() { String::new() } else { format!(": {limit}") };
        let ranks = if *count == 1 { "rank" } else { "ranks" };
        [format!("{count} {ranks}, {} each{limit}", show_bytes(*bytes)), hardware.line(*count, *measured)]
    }

    pub(crate) fn json(&self) -> JsonRanks {
        let Hardware { network, flops, memory_bandwidth } = &self.hardware;
        JsonRanks {
            memory: self.memory.bytes,
            bandwidth: network.inside.s_per_byte.recip(),
            latency: network.inside.latency,
            ranks_per_node: (network.per_node < self.count).then_some(network.per_node),
            node_bandwidth: network.between.s_per_byte.recip(),
            node_latency: network.between.latency,
            flops: *flops,
            memory_bandwidth: Some(*memory_bandwidth).filter(|rate| rate.is_finite()),
        }
    }
}

/// Bytes of memory of a rank, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Memory {
    /// Parameters of this rank, or its shards of them: trained and frozen, and the model's buffers.
    pub parameters: f64,
    /// Gradients, at the moment that most are held.
    pub gradients: f64,
    /// Optimizer state.
    pub optimizer: f64,
    /// Activations kept for backward, of all micro-batches in flight.
    pub activations: f64,
    /// Copies of parameters, gathered units, messages, and temporary memory of operations.
    pub buffers: f64,
}

impl Memory {
    /// Returns the sum of all kinds.
    pub fn total(&self) -> f64 {
        self.parameters + self.gradients + self.optimizer + self.activations + self.buffers
    }
}

/// Strategies or layouts that are not possible, for the same reason.
#[derive(Debug, Clone, PartialEq)]
pub struct RuledOut {
    /// Their names.
    pub names: Vec<String>,
    /// Why they are not possible.
    pub reason: String,
}

impl RuledOut {
    pub(crate) fn add(all: &mut Vec<Self>, name: String, reason: String) {
        match all.iter_mut().find(|known| known.reason == reason) {
            Some(known) => known.names.push(name),
            None => all.push(Self { names: vec![name], reason }),
        }
    }

    pub(crate) fn line(&self) -> String {
        format!("not possible: {}: {}", listed(&self.names), self.reason)
    }
}

/// Returns the columns of a line: name, whether it fits, bytes of each kind of memory and of all, bytes sent, and
/// seconds of a step.
pub(crate) fn cells(
    name: String,
    fits: bool,
    (kinds, all): ([f64; 5], f64),
    (sent, seconds): (f64, f64),
) -> [String; 10] {
    let [one, two, three, four, five] = kinds.map(show_bytes);
    let (fits, all, sent) = (if fits { "yes" } else { "no" }, show_bytes(all), show_bytes(sent));
    [name, fits.into(), one, two, three, four, five, all, sent, show_time(seconds)]
}

/// Returns a table's lines below their heading, whose first column and kinds of memory have these names.
pub(crate) fn aligned(first: &str, kinds: [&str; 5], rows: Vec<[String; 10]>) -> Vec<String> {
    let [one, two, three, four, five] = kinds;
    let names = [first, "fits", one, two, three, four, five, "all", "sent", "step"].map(String::from);
    let rows: Vec<[String; 10]> = std::iter::once(names).chain(rows).collect();
    let width = rows.iter().map(|[name, ..]| name.len() + 1).max().unwrap_or(0).max(20);
    let line = |[name, fits, numbers @ ..]: [String; 10]| {
        let numbers: String = numbers.iter().map(|number| format!("{number:>12}")).collect();
        format!("{name:<width$}{fits:<5}{numbers}")
    };
    rows.into_iter().map(line).collect()
}

/// Lists names, and only counts the last of many.
pub(crate) fn listed(names: &[String]) -> String {
    let (named, others) = names.split_at(names.len().min(MOST_NAMES));
    let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
    format!("{}{more}", named.join(" | "))
}

/// Strategy or layout, as it is compared with others.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Candidate<C> {
    pub(crate) name: String,
    /// Seconds of a step.
    pub(crate) seconds: f64,
    /// What it needs and does not have; `None` if it fits.
    pub(crate) lacks: Option<String>,
    /// The smaller, the simpler.
    pub(crate) complexity: C,
}

/// Returns the words for bytes that are more than there are, if they are.
pub(crate) fn lack(needed: f64, memory: f64) -> Option<String> {
    (needed > memory).then(|| format!("{} of {}", show_bytes(needed), show_bytes(memory)))
}

/// Returns the index of the fastest candidate that fits, or of the simplest one that is about as fast.
pub(crate) fn recommended<C: Ord>(all: &[Candidate<C>]) -> Option<usize> {
    let fitting = || (0..all.len()).filter(|place| all[*place].lacks.is_none());
    let quickest = fitting().map(|place| all[place].seconds).min_by(f64::total_cmp)?;
    let close = fitting().filter(|place| all[*place].seconds <= quickest * EQUAL_SPEED_FACTOR);
    close.min_by_key(|place| &all[*place].complexity)
}

/// Returns the recommendation of one of the candidates as a line, with reasons; `option` precedes its name.
pub(crate) fn recommendation<C: Ord>(all: &[Candidate<C>], best: usize, option: &str) -> String {
    let Candidate { name, seconds, .. } = &all[best];
    let others = || all.iter().enumerate().filter(|(place, _)| *place != best).map(|(_, other)| other);
    let fitting = others().filter(|other| other.lacks.is_none());
    let mut reasons = Vec::new();
    if others().next().is_none() {
        reasons.push("it is the only way".to_string());
    } else if let Some(next) = fitting.min_by(|a, b| a.seconds.total_cmp(&b.seconds)) {
        let what = if next.seconds < *seconds { "as quick as, and simpler than," } else { "before" };
        let (own, next_time) = (show_time(*seconds), show_time(next.seconds));
        reasons.push(format!("{own} a step, {what} {} ({next_time})", next.name));
    } else {
        reasons.push("nothing else fits".to_string());
    }
    let quicker = others().filter(|other| other.seconds < *seconds && other.lacks.is_some());
    if let Some(Candidate { name, lacks: Some(lacks), .. }) = quicker.min_by_key(|other| &other.complexity) {
        reasons.push(format!("{name} would be quicker, but needs {lacks}"));
    }
    format!("recommended: {option}{name}: {}", reasons.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_memory_of_a_container_and_it_is_said() {
        let total = UsableMemory { bytes: 256 << 20, limit: Some("/sys/fs/cgroup/memory.max".into()) };
        let limit =
            "this machine has 268 MB for this container or job (/sys/fs/cgroup/memory.max)".to_string();
        assert_eq!(RankMemory::share(&total, 4), RankMemory { bytes: 67108864.0, limit });
        let machine = UsableMemory { limit: None, ..total };
        assert_eq!(RankMemory::share(&machine, 2), RankMemory { bytes: 134217728.0, limit: String::new() });
    }

    /// Candidates by name, bytes and complexity.
    fn candidates(memory: f64, seconds: &[f64]) -> Vec<Candidate<usize>> {
        let all = [("pp=4", 1e9, 3), ("shard=2,tp=2", 2e9, 4), ("tp=4", 3e9, 2), ("dp=4", 9e9, 1)];
        let candidate = |((name, bytes, complexity), seconds): ((&str, f64, usize), &f64)| Candidate {
            name: name.into(),
            seconds: *seconds,
            lacks: lack(bytes, memory),
            complexity,
        };
        all.into_iter().zip(seconds).map(candidate).collect()
    }

    #[test]
    fn the_quickest_that_fits_is_taken_or_a_simpler_one() {
        let line = |seconds: &[f64], memory| {
            let all = candidates(memory, seconds);
            recommended(&all).map(|best| recommendation(&all, best, "--mesh "))
        };
        let quick = [3.0, 1.0, 2.0, 0.5];
        assert_eq!(
            line(&quick, 4e9).unwrap(),
            "recommended: --mesh shard=2,tp=2: 1.00 s a step, before tp=4 (2.00 s); dp=4 would be quicker, but needs 9.00 GB of 4.00 GB"
        );
        assert!(line(&quick, 9e9).unwrap().starts_with("recommended: --mesh dp=4: "));
        let near = line(&[3.0, 1.0, 1.01, 5.0], 4e9).unwrap();
        assert_eq!(
            near,
            "recommended: --mesh tp=4: 1.01 s a step, as quick as, and simpler than, shard=2,tp=2 (1.00 s)"
        );
        assert!(line(&quick, 1e9).unwrap().contains("nothing else fits; dp=4 would be quicker"));
        assert_eq!(line(&quick, 1e8), None);
        assert_eq!(line(&quick[..1], 1e9).unwrap(), "recommended: --mesh pp=4: it is the only way");
    }
}

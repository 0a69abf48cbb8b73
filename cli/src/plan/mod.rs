//! `plan`: compares the layouts of a model over ranks by memory and time, and recommends one.

mod language;

use crate::console::say;
use crate::error::{Error, Result};
use crate::outputs::{self, check_in_place};
use crate::start::{self, SPAWNED_FOR};
use comm::{Communicator, Tcp, TcpConfig};
use plan::command::{NetworkName, PlanOptions};
use plan::forecast::{Link, Network};
use plan::measure::Machine;
use plan::{Hardware, Ranks, Setting, Table, planned};
use report::trace;

pub(crate) use language::recompute_fits;

/// The command's name.
pub const NAME: &str = "plan";

/// Runs the command.
///
/// # Errors
/// A wrong option; ranks that fail while measuring.
pub fn run(options: &PlanOptions) -> Result<()> {
    trace::install(false)?;
    if launch::is_worker() && std::env::var_os(SPAWNED_FOR).is_some_and(|name| name == NAME) {
        return measure();
    }
    options.check()?;
    options.json.as_deref().map_or(Ok(()), check_in_place)?;
    if let Some(folder) = &options.language.folder {
        return language::run(options, folder);
    }
    let model = options.model()?;
    let ranks = ranks(options, options.ranks)?;
    let setting = Setting {
        ranks: options.ranks,
        batch_size: options.batch_size(),
        micro_batches: options.micro_batches,
        element: options.element_bytes as u64,
        gathered: options.gathered_bytes.unwrap_or(options.element_bytes) as u64,
        optimizer: options.optimizer().numbers(),
    };
    let all = planned(&model, &setting, &ranks.hardware)?;
    let table = Table { model: &model, setting: &setting, optimizer: options.optimizer(), ranks: &ranks };
    if let Some(path) = &options.json {
        outputs::write(path, table.json(&all)?)?;
    }
    table.lines(&all)?.iter().try_for_each(|line| say(format_args!("{line}")))
}

/// Measures this machine, as one of two ranks.
fn measure() -> Result<()> {
    let config = TcpConfig::from_env()?;
    let machine = || -> comm::Result<_> {
        let comm = Tcp::connect(&config)?;
        Ok((comm.rank(), Machine::measure(&comm)?))
    };
    match machine().map_err(|error| Error::in_rank(config.rank, error.into()))? {
        (0, machine) => start::hand_over(&machine),
        _ => Ok(()),
    }
}

/// Returns the ranks with memory and hardware as given by options; missing values are measured.
fn ranks(options: &PlanOptions, count: usize) -> Result<Ranks> {
    let preset = options.network.map(NetworkName::network);
    let (mut bandwidth, mut latency, mut flops) = (options.bandwidth, options.latency, options.flops);
    let mut memory_bandwidth = options.memory_bandwidth;
    let between_is_known = preset.is_some() || (bandwidth.is_some() && latency.is_some());
    let measured = !(between_is_known && flops.is_some());
    // On a CPU, the same processor computes and moves the bytes.
    let mut overlaps = true;
    if measured {
        let found = start::spawn::<Machine>(NAME, 2, None)?;
        if preset.is_none() && bandwidth.is_none() {
            overlaps = std::thread::available_parallelism().map_or(1, usize::from) >= 2 * count;
        }
        (bandwidth, latency) = (bandwidth.or(Some(found.bandwidth)), latency.or(Some(found.latency)));
        flops = flops.or(Some(found.flops));
        memory_bandwidth = memory_bandwidth.or(Some(found.memory_bandwidth));
    }
    let link = |bandwidth: Option<f64>, latency: Option<f64>| Link {
        latency: latency.unwrap_or_default(),
        s_per_byte: bandwidth.unwrap_or(f64::INFINITY).recip(),
    };
    let mut network = preset.unwrap_or_else(|| {
        let between = link(options.node_bandwidth.or(bandwidth), options.node_latency.or(latency));
        Network { between, ..Network::one_node("", link(bandwidth, latency), 0.0, overlaps) }
    });
    network.per_node = options.ranks_per_node.unwrap_or(network.per_node);
    let known = |rate: Option<f64>| rate.unwrap_or(f64::INFINITY);
    let (flops, memory_bandwidth) = (known(flops), known(memory_bandwidth));
    let hardware = Hardware { network, flops, memory_bandwidth };
    Ok(Ranks { count, memory: options.memory(count), hardware, measured })
}

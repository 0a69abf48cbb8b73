//! Benchmarks of collectives by transport, number of ranks and size; each rank is a process.

use benches::Ranks;
use comm::Transport;
use criterion::{BenchmarkId, Throughput};
use plan::measure::Measured;

use crate::group::Group;

/// Operations that are also measured with more than two ranks.
const MOST_USED: [Measured; 3] = [Measured::AllReduce, Measured::AllGather, Measured::ReduceScatter];
const SIZES: [usize; 3] = [4 << 10, 1 << 20, 16 << 20];

pub(crate) fn bench(group: &mut Group<'_>) {
    for (world_size, transport) in [2, 4]
        .into_iter()
        .flat_map(|ranks| [Transport::Shm, Transport::Tcp].map(|transport| (ranks, transport)))
    {
        let ranks = Ranks { transport, ..Ranks::new(world_size) };
        let measured =
            Measured::ALL.into_iter().filter(|operation| world_size == 2 || MOST_USED.contains(operation));
        for operation in measured {
            let name = operation.name();
            let id = format!("{name}/{transport}/{world_size} ranks");
            let time = |bytes, rounds| ranks.time(name, bytes, rounds).expect("ranks run");
            if operation == Measured::Barrier {
                let id = BenchmarkId::from_parameter(id);
                group.bench_function(id, |bencher| bencher.iter_custom(|rounds| time(0, rounds)));
                continue;
            }
            for bytes in SIZES {
                group.throughput(Throughput::Bytes(bytes as u64));
                group.bench_function(BenchmarkId::new(&id, bytes), |bencher| {
                    bencher.iter_custom(|rounds| time(bytes, rounds));
                });
            }
        }
    }
}

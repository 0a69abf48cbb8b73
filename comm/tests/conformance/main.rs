//! Conformance suite for all backends: each collective with various world sizes, lengths, dtypes and ops, compared with
//! a plain computation.
#![allow(clippy::unwrap_used)]

mod batch;
mod cases;
mod groups;
mod halves;
mod moves;
mod overlaps;
mod reference;
mod transports;
mod uneven;

use std::time::Duration;

use candle_core::Device;
use comm::{Communicator, InitMethod, Local, Result, Secret, Tcp, TcpConfig, Tls, Transport};

/// Runs `body` on every rank of a group of one backend.
trait Backend {
    fn run(&self, world_size: usize, body: &(dyn Fn(&dyn Communicator) -> Result<()> + Sync));
}

/// Returns the device of the cases' tensors.
fn device() -> Device {
    Device::Cpu
}

struct Threads;

impl Backend for Threads {
    fn run(&self, world_size: usize, body: &(dyn Fn(&dyn Communicator) -> Result<()> + Sync)) {
        Local::run(world_size, |comm| body(comm))
            .unwrap_or_else(|error| panic!("{world_size} ranks: {error}"));
    }
}

/// Ranks that connect over TCP and exchange data over the given transport, each in a thread.
struct Processes(Transport, Tls);

impl Backend for Processes {
    fn run(&self, world_size: usize, body: &(dyn Fn(&dyn Communicator) -> Result<()> + Sync)) {
        let folder = tempfile::tempdir().unwrap();
        let config = TcpConfig {
            world_size,
            init_method: InitMethod::File(folder.path().join("meeting")),
            timeout: Duration::from_secs(60),
            secret: Some(Secret::random().unwrap()),
            transport: self.0,
            tls: self.1,
            ..TcpConfig::default()
        };
        std::thread::scope(|scope| {
            for rank in 0..world_size {
                let config = TcpConfig { rank, ..config.clone() };
                scope.spawn(move || {
                    let run = || body(&Tcp::connect(&config)?);
                    run().unwrap_or_else(|error| panic!("rank {rank} of {world_size}: {error}"));
                });
            }
        });
    }
}

macro_rules! suite {
    ($name:ident, $backend:expr) => {
        mod $name {
            use super::*;

            #[test]
            fn all_reduce() {
                cases::all_reduce(&$backend);
            }

            #[test]
            fn reduce() {
                cases::reduce(&$backend);
            }

            #[test]
            fn broadcast() {
                cases::broadcast(&$backend);
            }

            #[test]
            fn all_gather() {
                cases::all_gather(&$backend);
            }

            #[test]
            fn reduce_scatter() {
                cases::reduce_scatter(&$backend);
            }

            #[test]
            fn gather() {
                moves::gather(&$backend);
            }

            #[test]
            fn scatter() {
                moves::scatter(&$backend);
            }

            #[test]
            fn all_to_all() {
                moves::all_to_all(&$backend);
            }

            #[test]
            fn uneven_parts() {
                uneven::collectives(&$backend);
            }

            #[test]
            fn uneven_all_to_all() {
                uneven::all_to_all(&$backend);
            }

            #[test]
            fn counts_that_differ() {
                uneven::mismatches(&$backend);
            }

            #[test]
            fn large_tensors_along_a_chain() {
                moves::chain(&$backend);
            }

            #[test]
            fn views_of_one_storage() {
                moves::views(&$backend);
            }

            #[test]
            fn parts_in_their_place() {
                overlaps::in_place(&$backend);
            }

            #[test]
            fn what_overlaps_is_refused() {
                overlaps::refused(&$backend);
            }

            #[test]
            fn what_is_not_written_is_given_twice() {
                overlaps::twice(&$backend);
            }

            #[test]
            fn messages() {
                cases::messages(&$backend);
            }

            #[test]
            fn batches() {
                batch::rings(&$backend);
            }

            #[test]
            fn batches_and_single_messages() {
                batch::with_single_messages(&$backend);
            }

            #[test]
            fn coalesced() {
                batch::coalesced(&$backend);
            }

            #[test]
            fn halves_are_rounded_once() {
                halves::are_rounded_once(&$backend);
            }

            #[test]
            fn halves_are_sent_as_they_are() {
                halves::are_sent_as_they_are(&$backend);
            }

            #[test]
            fn groups() {
                groups::at_the_same_time(&$backend);
            }

            #[test]
            fn groups_of_any_color_and_key() {
                groups::large_numbers(&$backend);
            }

            #[test]
            fn groups_that_close() {
                groups::closing(&$backend);
            }

            #[test]
            fn groups_that_are_refused() {
                groups::mistakes(&$backend);
            }

            #[test]
            fn barrier() {
                cases::barrier(&$backend);
            }

            #[test]
            fn queued_operations_keep_their_order() {
                cases::queued(&$backend);
            }

            #[test]
            fn mistakes_leave_the_group_usable() {
                cases::mistakes(&$backend);
            }
        }
    };
}

suite!(local, Threads);
suite!(tcp, Processes(Transport::Tcp, Tls::Off));
suite!(tls, Processes(Transport::Tcp, Tls::All));
#[cfg(all(target_os = "linux", not(portable)))]
suite!(shm, Processes(Transport::Shm, Tls::Off));

#[test]
fn sums_do_not_depend_on_what_carries_them() {
    transports::compare(&[
        &Threads,
        &Processes(Transport::Tcp, Tls::Off),
        &Processes(Transport::Tcp, Tls::All),
        #[cfg(all(target_os = "linux", not(portable)))]
        &Processes(Transport::Shm, Tls::Off),
    ]);
}

#[test]
fn the_trait_is_object_safe_and_shared_between_threads() {
    fn takes(_: &(dyn Communicator + Send + Sync)) {}
    Local::run(1, |comm| {
        takes(comm);
        Ok(())
    })
    .unwrap();
}

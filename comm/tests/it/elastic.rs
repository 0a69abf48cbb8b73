//! Groups over TCP that go on without a rank, with ranks as threads.

use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use comm::{Communicator, Elastic, InitMethod, Operation, Secret, Tcp, TcpConfig};

/// Runs `body` on each rank of a group that may change, whose first rank keeps `file` for new ranks.
fn on_ranks<T: Send>(
    ranks: usize,
    file: Option<&Path>,
    body: impl Fn(Arc<dyn Communicator>) -> T + Sync,
) -> Vec<T> {
    let folder = tempfile::tempdir().unwrap();
    let config = TcpConfig {
        world_size: ranks,
        secret: Some(Secret::random().unwrap()),
        init_method: InitMethod::File(folder.path().join("meeting")),
        timeout: Duration::from_secs(4),
        elastic: Some(Elastic { file: file.map(Path::to_path_buf), ..Elastic::default() }),
        ..TcpConfig::default()
    };
    let run = |rank| body(Arc::new(Tcp::connect(&TcpConfig { rank, ..config.clone() }).unwrap()));
    let run = &run;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Only rank 1 waits for the first rank, in a group of the two; the others wait for rank 1.
#[test]
fn a_rank_that_is_blamed_in_a_part_of_the_group_is_left_behind() {
    let all_are_done = Barrier::new(4);
    let left = on_ranks(4, None, |comm| {
        let [first, second] = [&[0, 1], &[2, 3]].map(|ranks| comm.new_group(ranks).unwrap());
        let pair = first.or(second).unwrap();
        let mut left = Vec::new();
        if comm.rank() > 0 {
            let waits = |comm: &dyn Communicator| comm.run(Operation::Barrier);
            let error = waits(&*pair).and_then(|()| waits(&*comm)).unwrap_err();
            assert!(error.is_loss(), "{error}");
            left = comm.elastic().unwrap().shrink().unwrap().world_ranks().to_vec();
        }
        all_are_done.wait();
        left
    });
    assert_eq!(left[1..], [[1, 2, 3]; 3]);
}

#[test]
fn a_group_that_new_ranks_cannot_find_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (gone, all_have_met) = (folder.path().join("gone"), Barrier::new(3));
    std::fs::create_dir(&gone).unwrap();
    let left = on_ranks(3, Some(&gone.join("group")), |comm| {
        all_have_met.wait();
        if comm.rank() == 0 {
            std::fs::remove_dir_all(&gone).unwrap();
            return Vec::new();
        }
        let error = comm.run(Operation::Barrier).unwrap_err();
        assert!(error.is_loss(), "{error}");
        comm.elastic().unwrap().shrink().unwrap().world_ranks().to_vec()
    });
    assert_eq!(left[1..], [[1, 2]; 2]);
}

//! Tests of device meshes.

use std::sync::Arc;

use comm::{Communicator, Local, LocalConfig, Mesh};

fn on_each<T: Send + 'static>(
    world_size: usize,
    body: impl Fn(Arc<dyn Communicator>) -> T + Copy + Send + 'static,
) -> Vec<T> {
    let group = Local::group(world_size, &LocalConfig::default()).unwrap();
    let spawn = |comm: Local| std::thread::spawn(move || body(Arc::new(comm)));
    let threads: Vec<_> = group.into_iter().map(spawn).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn every_axis_is_a_group() {
    let found = on_each(12, |comm| {
        let mesh = Mesh::new(comm, &[("pp", 2), ("dp", 3), ("tp", 2)]).unwrap();
        let along = |name: &str| mesh.axis(name).unwrap().world_ranks().to_vec();
        assert_eq!(mesh.axes().collect::<Vec<_>>(), [("pp", 2), ("dp", 3), ("tp", 2)]);
        assert_eq!(mesh.world().world_size(), 12);
        (mesh.coordinates(), along("pp"), along("dp"), along("tp"))
    });
    assert_eq!(found[0], (vec![0, 0, 0], vec![0, 6], vec![0, 2, 4], vec![0, 1]));
    assert_eq!(found[9], (vec![1, 1, 1], vec![3, 9], vec![7, 9, 11], vec![8, 9]));
}

#[test]
fn what_is_no_grid_is_refused() {
    on_each(2, |comm| {
        let wrong: [&[(&str, usize)]; 5] =
            [&[("dp", 3)], &[("dp", 0)], &[("dp", 2), ("dp", 1)], &[], &[("dp", usize::MAX), ("tp", 2)]];
        for axes in wrong {
            assert!(Mesh::new(comm.clone(), axes).is_err(), "{axes:?}");
        }
        let mesh = Mesh::new(comm, &[("dp", 2)]).unwrap();
        assert!(mesh.axis("tp").unwrap_err().to_string().contains("give one of dp"));
    });
}

#[test]
fn different_axes_are_refused_on_every_rank() {
    let others: [&[(&str, usize)]; 3] = [&[("dp", 4)], &[("dp", 2), ("pp", 2)], &[("tp", 2), ("dp", 2)]];
    for odd in others {
        let said = on_each(4, move |comm| {
            let axes: &[(&str, usize)] = if comm.rank() == 2 { odd } else { &[("dp", 2), ("tp", 2)] };
            Mesh::new(comm, axes).unwrap_err().to_string()
        });
        for said in said {
            assert!(said.contains("other ones on rank 2 than on rank 0 (here "), "{said}");
            assert!(said.ends_with("give every rank the same axes"), "{said}");
        }
    }
}

#[test]
fn a_plane_of_one_axis_that_has_ranks_is_the_group_of_that_axis() {
    on_each(4, |comm| {
        let mesh = Mesh::new(comm, &[("pp", 2), ("dp", 2), ("shard", 1), ("tp", 1)]).unwrap();
        let is_axis = |axes: &[&str], name| Arc::ptr_eq(&mesh.plane(axes).unwrap(), mesh.axis(name).unwrap());
        assert!(is_axis(&["dp", "shard", "tp"], "dp") && is_axis(&["tp", "pp"], "pp"));
        assert_eq!(mesh.plane(&["shard", "tp"]).unwrap().world_ranks(), [mesh.world().rank()]);
        assert!(Arc::ptr_eq(&mesh.plane(&["dp", "pp", "tp"]).unwrap(), mesh.world()));
    });
}

#[test]
fn a_plane_is_a_group_of_several_axes() {
    let found = on_each(8, |comm| {
        let mesh = Mesh::new(comm, &[("pp", 2), ("dp", 2), ("tp", 2)]).unwrap();
        let plane = |axes: &[&str]| {
            let group = mesh.plane(axes).unwrap();
            assert_eq!(group.world_ranks()[group.rank()], mesh.world().rank());
            group.barrier().unwrap().wait().unwrap();
            group.world_ranks().to_vec()
        };
        for axes in [&["dp", "dp"][..], &["dp", "ep"]] {
            assert!(mesh.plane(axes).is_err(), "{axes:?}");
        }
        [plane(&["tp", "dp"]), plane(&["pp", "tp"]), plane(&["pp"]), plane(&["dp", "pp", "tp"]), plane(&[])]
    });
    let all = (0..8).collect::<Vec<_>>();
    assert_eq!(found[0], [vec![0, 1, 2, 3], vec![0, 1, 4, 5], vec![0, 4], all.clone(), vec![0]]);
    assert_eq!(found[6], [vec![4, 5, 6, 7], vec![2, 3, 6, 7], vec![2, 6], all, vec![6]]);
}

//! Replicas of shards that differ are named on every rank.

use crate::common::{INPUTS, Mlp, builder, on_all_ranks, values};
use candle_core::{DType, Device};
use candle_nn::{Init, Module, Optimizer, SGD, VarBuilder, VarMap};
use comm::Mesh;
use fsdp::{DistributedModel, Error, Fsdp, FsdpConfig, ShardingStrategy};

#[test]
fn a_copy_that_differs_is_named_on_every_rank() {
    for (shards, copies) in [(2, 2), (1, 3), (3, 1)] {
        let found = on_all_ranks(shards * copies, |comm| {
            let last = comm.rank() + 1 == comm.world_size();
            let mesh = Mesh::new(comm, &[("dp", copies), ("shard", shards)])?;
            let config = FsdpConfig::default();
            let fsdp = Fsdp::hybrid(&mesh, ("shard", "dp"), builder(1, DType::F64), &config, Mlp::new)?;
            let mut optimizer = SGD::new(fsdp.vars(), 0.5)?;
            for step in 0..3 {
                let x = values(10 * step + mesh.world().rank() as u64, &[2, INPUTS], DType::F64);
                let mut grads = fsdp.backward(&fsdp.forward(&x)?.sqr()?.sum_all()?)?;
                fsdp.clip_grad_norm(&mut grads, 0.1)?;
                optimizer.step(&grads)?;
                fsdp.check_parameters()?;
            }
            let shard = fsdp.vars().remove(2);
            if last {
                shard.set(&shard.affine(1.0, 0.5)?)?;
            }
            let found = fsdp.check_parameters();
            // Training can continue after such an error.
            shard.set(&shard.zeros_like()?)?;
            fsdp.check_parameters()?;
            Ok(found.err().map(|error| error.to_string()))
        });
        assert!(found.iter().all(|line| *line == found[0]), "{found:?}");
        match &found[0] {
            None => assert_eq!(copies, 1, "nobody else has it"),
            Some(line) => {
                let odd = format!("rank {} has", shards * copies - 1);
                assert!(
                    line.starts_with("parameter l1.weight is not the same") && line.contains(&odd),
                    "{line}"
                );
            }
        }
    }
}

#[test]
fn whole_copies_are_compared_as_well() {
    let found = on_all_ranks(3, |comm| {
        let rank = comm.rank();
        let config = FsdpConfig { strategy: ShardingStrategy::NoShard, ..FsdpConfig::default() };
        let fsdp = Mlp::fsdp(comm, 1, DType::F32, &config)?;
        fsdp.check_parameters()?;
        let shard = fsdp.vars().remove(0);
        shard.set(&shard.affine(1.0, if rank == 1 { 0.5 } else { 0.0 })?)?;
        Ok(fsdp.check_parameters().expect_err("they differ"))
    });
    for error in &found {
        assert!(
            matches!(error, Error::Strategy(strategy::Error::ParametersDiffer(found)) if found.odd_rank == 1),
            "{error}"
        );
    }
}

#[test]
fn a_buffer_that_differs_is_named_on_every_rank() {
    let lines = on_all_ranks(2, |comm| {
        let rank = comm.rank() as f64;
        let config = FsdpConfig { buffers: vec!["pe".into()], ..FsdpConfig::default() };
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F64, &Device::Cpu);
        let built = Fsdp::new(comm, vb, &config, |units| {
            units.pp("table").unit(|vb| {
                vb.get_with_hints(3, "pe", Init::Const(rank))?;
                vb.get_with_hints((2, 2), "weight", Init::Const(1.0))
            })
        });
        Ok(built.map(drop).expect_err("the tables differ").to_string())
    });
    for line in lines {
        assert!(line.contains("buffer table.pe"), "{line}");
    }
}

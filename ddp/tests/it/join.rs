//! Ranks with different numbers of batches, compared with PyTorch's `join`.

use std::collections::HashMap;

use crate::common::{assert_close, on_all_ranks, parameters_of};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Optimizer, SGD, VarBuilder, linear, loss};
use ddp::{Ddp, DdpConfig};
use serde_json::Value;

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
}

fn tensor(value: &Value, columns: usize) -> Tensor {
    let values = floats(value);
    let rows = values.len() / columns;
    Tensor::from_vec(values, (rows, columns), &Device::Cpu).expect("on the CPU")
}

fn builder(initial: &Value) -> VarBuilder<'static> {
    let tensors: HashMap<String, Tensor> = HashMap::from([
        ("first.weight".into(), tensor(&initial[0], 3)),
        ("first.bias".into(), tensor(&initial[1], 4).squeeze(0).expect("a row")),
        ("last.weight".into(), tensor(&initial[2], 4)),
        ("last.bias".into(), tensor(&initial[3], 2).squeeze(0).expect("a row")),
    ]);
    VarBuilder::from_tensors(tensors, DType::F64, &Device::Cpu)
}

#[test]
fn equal_to_pytorchs_join_that_divides_by_the_ranks_left() {
    let fixture: Value =
        serde_json::from_str(include_str!("../fixtures/join.json")).expect("the fixture is JSON");
    let batches = fixture["batches"].as_array().expect("a list by rank");
    let expected: Vec<f64> = fixture["trained"].as_array().expect("a list").iter().flat_map(floats).collect();
    let config = DdpConfig { bucket_bytes: 100, first_bucket_bytes: 50, ..Default::default() };
    let ranks = on_all_ranks(batches.len(), |comm| {
        let rank = comm.rank();
        let ddp: Ddp<[Linear; 2]> = Ddp::new(comm, builder(&fixture["initial"]), &config, |vb| {
            Ok([linear(3, 4, vb.pp("first"))?, linear(4, 2, vb.pp("last"))?])
        })?;
        let mut optimizer = SGD::new(ddp.vars(), fixture["lr"].as_f64().expect("a number"))?;
        for batch in batches[rank].as_array().expect("a list by step") {
            let [first, last] = ddp.model()?;
            let hidden = tensor(&batch[0], 3).apply(first)?.tanh()?;
            let loss = loss::mse(&hidden.apply(last)?, &tensor(&batch[1], 2))?;
            optimizer.step(&ddp.backward_weighted(&loss, 1.0)?)?;
        }
        while let Some(grads) = ddp.join()? {
            optimizer.step(&grads)?;
        }
        Ok(parameters_of(&ddp))
    });
    for trained in &ranks {
        assert_eq!(*trained, ranks[0]);
        assert_close(trained, &expected, 1e-12);
    }
}

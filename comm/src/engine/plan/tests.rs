//! Tests of the planner's memory of schedules.

use candle_core::Device;

use super::*;

fn tensor(len: usize) -> Tensor {
    Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap()
}

fn schedule(planner: &Planner, operation: &Operation) -> Arc<Schedule> {
    planner.plan(operation).unwrap().schedule
}

/// Calls that differ in one thing each, more of them than the planner remembers.
fn calls() -> Vec<Operation> {
    let mut calls = vec![Operation::Barrier];
    for len in (3..60).step_by(3) {
        let op = ReduceOp::Sum;
        calls.push(Operation::AllReduce { tensor: tensor(len), op });
        calls.push(Operation::AllReduce { tensor: tensor(len).to_dtype(DType::F64).unwrap(), op });
        calls.push(Operation::Broadcast { tensor: tensor(len), root: 0 });
        calls.push(Operation::Broadcast { tensor: tensor(len), root: 2 });
        calls.push(Operation::BroadcastCoalesced { tensors: vec![tensor(len), tensor(1)], root: 2 });
        calls.push(Operation::AllGather { output: tensor(3 * len), input: tensor(len), counts: None });
        let counts = Some(vec![len, 2, 1]);
        calls.push(Operation::AllGather { output: tensor(len + 3), input: tensor(2), counts });
    }
    calls
}

#[test]
fn a_schedule_that_is_remembered_is_the_one_that_would_be_made() {
    let topology = || Topology::one_host(3);
    let planner = Planner::new(1, topology());
    for _ in 0..2 {
        for call in calls() {
            let expected = schedule(&Planner::new(1, topology()), &call);
            assert_eq!(schedule(&planner, &call), expected, "{call:?}");
            assert_eq!(schedule(&planner, &call), expected, "{call:?}");
        }
    }
}

#[test]
fn a_repeated_call_gets_the_schedule_made_before() {
    let planner = Planner::new(1, Topology::one_host(3));
    let (first, other) = (Operation::Barrier, Operation::Broadcast { tensor: tensor(5), root: 0 });
    let made = schedule(&planner, &first);
    schedule(&planner, &other);
    assert!(Arc::ptr_eq(&made, &schedule(&planner, &first)));
    for call in calls() {
        schedule(&planner, &call);
    }
    assert!(planner.recent.borrow().len() <= RECENT);
}

#[test]
fn a_long_schedule_is_not_kept() {
    let planner = Planner::new(1, Topology::one_host(300));
    let call = Operation::AllGather { output: tensor(300), input: tensor(1), counts: None };
    assert!(schedule(&planner, &call).steps.len() > MOST_STEPS);
    assert!(planner.recent.borrow().is_empty());
}

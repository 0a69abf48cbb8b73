//! Fuzz target for the coordinator: any messages of any nodes, in any order.

use std::time::Instant;

use super::coordinator::Coordinator;
use crate::message::{JobOutcome, NodeMessage, Order, Round};

const NODES: usize = 3;

/// Each line is a message: one character for the node, then the JSON text.
pub fn fuzz_coordinator(data: &[u8]) {
    let round =
        Round { run_id: "run".into(), secret: None, host: None, port: 0, restart: 0, max_restarts: 2 };
    let mut coordinator = Coordinator::new((0..NODES).map(|node| format!("h{node}")).collect(), round);
    // A launcher that is stopped may have left before the others' end.
    let (now, mut over) = (Instant::now(), [false; NODES]);
    for line in data.split(|byte| *byte == b'\n') {
        let Some((node, text)) = line.split_first() else { continue };
        if let Ok(order) = serde_json::from_slice::<Order>(text) {
            look(&order);
        }
        let Ok(message) = serde_json::from_slice::<NodeMessage>(text) else { continue };
        let orders = coordinator.handle(usize::from(*node) % NODES, message, now);
        for (node, order) in &orders {
            assert!(!over[*node], "an order after the end");
            over[*node] = matches!(order, Order::Over(_));
            look(order);
        }
    }
}

fn look(order: &Order) {
    match order {
        Order::Over(JobOutcome::Failed(failure)) => assert!(!failure.to_string().is_empty()),
        Order::Start(round) => assert!(round.restart <= round.max_restarts || round.secret.is_none()),
        _ => {}
    }
}

//! Tests of `plan`: its formulas compared with measured runs, and its output.

mod formulas;
mod language;
mod output;
mod runs;

const PLAN: crate::common::Girandole = crate::common::Girandole("plan");

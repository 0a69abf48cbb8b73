//! `plan`: its formulas against what runs measure, and what it prints.

mod formulas;
mod language;
mod output;
mod runs;

const PLAN: crate::common::Girandole = crate::common::Girandole("plan");

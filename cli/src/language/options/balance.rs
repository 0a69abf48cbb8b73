//! How experts are balanced: `--balance` and `--balance-coefficient`.

use clap::ValueEnum;
use girandole::ExpertBalance;
use models::{ExpertsConfig, ModelConfig};
use ops::BalanceLoss;

use super::TrainOptions;
use crate::error::{Error, Result};
use crate::options::value_name;

/// What keeps experts equally loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::language) enum BalanceOption {
    /// A loss of each row.
    Row,
    /// A loss of all rows of a step, as in transformers.
    Batch,
    /// No loss: a correction of each expert, which moves once a step.
    Bias,
    /// Nothing.
    None,
}

impl TrainOptions {
    /// Returns how the experts of a model are balanced, which may be trained by adapters.
    ///
    /// # Errors
    /// Options for experts, and a model without any; corrections, and experts that have none.
    pub(in crate::language) fn balance(
        &self,
        model: &ModelConfig,
        has_adapters: bool,
    ) -> Result<Option<ExpertBalance>> {
        let Some(experts) = &model.experts else {
            let given = [
                ("--balance", self.balance.map(|how| value_name(&how))),
                ("--balance-coefficient", self.balance_coefficient.map(|factor| factor.to_string())),
            ];
            return match given.into_iter().find_map(|(option, got)| Some((option, got?))) {
                None => Ok(None),
                Some((option, got)) => {
                    let help = format!("this model, a {}, has no experts: leave it out", model.family);
                    Err(Error::Option { option, got, help })
                }
            };
        };
        let balance = self.balance_of(experts, model.labels.is_some());
        if balance.bias.is_some() {
            let refuse = |help| Err(Error::Option { option: "--balance", got: "bias".into(), help });
            if experts.sigmoid.is_none() {
                return refuse(format!(
                    "experts of a {} have no corrections: give row, batch or none",
                    model.family
                ));
            }
            if has_adapters {
                return refuse("adapters are saved without corrections: leave it out".into());
            }
        }
        match (balance.loss, self.balance_coefficient) {
            (None, Some(factor)) if balance.bias.is_none() => {
                let help =
                    "nothing balances the experts: give --balance row, batch or bias, or leave it out".into();
                Err(Error::Option { option: "--balance-coefficient", got: factor.to_string(), help })
            }
            _ => Ok(Some(balance)),
        }
    }

    /// Returns how these experts are balanced, of a model that writes text or has labels.
    pub(in crate::language) fn balance_of(&self, experts: &ExpertsConfig, has_labels: bool) -> ExpertBalance {
        let loss = match self.balance {
            Some(BalanceOption::Row) => Some(BalanceLoss::Row),
            Some(BalanceOption::Batch) => Some(BalanceLoss::Batch),
            Some(BalanceOption::Bias | BalanceOption::None) => None,
            // The heads of transformers that score documents have no such loss.
            None => (experts.is_balanced && !has_labels).then_some(BalanceLoss::Batch),
        };
        let coefficient = self.balance_coefficient.unwrap_or(experts.balance_coefficient);
        let bias = (self.balance == Some(BalanceOption::Bias)).then_some(coefficient);
        ExpertBalance { loss, coefficient, bias, experts: experts.count }
    }
}

/// Returns what balances experts, as the command line calls it.
pub(in crate::language) fn balance_name(balance: &ExpertBalance) -> String {
    value_name(&match balance.loss {
        Some(BalanceLoss::Row) => BalanceOption::Row,
        Some(BalanceLoss::Batch) => BalanceOption::Batch,
        None if balance.bias.is_some() => BalanceOption::Bias,
        None => BalanceOption::None,
    })
}

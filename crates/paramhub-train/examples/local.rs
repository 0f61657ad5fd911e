//! Trains in one process: `local [NET] [DATA] [WORKERS] [BATCH] [EPOCHS] [OPTIMIZER] [RATE] [MOMENTUM] [SEED]`.

use std::error::Error;

use paramhub_kernels::{Hyperparameters, Registry};
use paramhub_train::data::DataSource;
use paramhub_train::local::LocalExchange;
use paramhub_train::net::{NetKind, Network};
use paramhub_train::trainer::{Evaluate, TrainConfig, train};

fn main() -> Result<(), Box<dyn Error>> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let argument =
        |index: usize, default: &str| given.get(index).cloned().unwrap_or_else(|| default.to_owned());
    let net: NetKind = argument(0, "lenet").parse()?;
    let data = argument(1, "digits").parse::<DataSource>()?.load()?;
    let (workers, batch) = (argument(2, "4").parse()?, argument(3, "16").parse()?);
    let config = TrainConfig {
        epochs: argument(4, "20").parse()?,
        batch,
        seed: argument(8, "1").parse()?,
        evaluate: Evaluate::AtEnd,
    };
    let registry = Registry::with_builtins();
    let optimizer = registry.optimizer(&argument(5, "sgd"))?;
    let hyperparameters = Hyperparameters {
        learning_rate: argument(6, "0.02").parse()?,
        momentum: argument(7, "0.9").parse()?,
        ..optimizer.defaults()
    };
    optimizer.check(&hyperparameters)?;
    let mut network = Network::new(net, data.train.geometry(), config.seed)?;
    let aggregator = registry.aggregator("sum")?;
    let mut exchange = LocalExchange::new(network.keys(), workers, aggregator, optimizer, hyperparameters);
    let mut epoch = 0;
    let report = train(&config, &data, &mut network, &mut exchange, &mut |progress| {
        if progress.epoch != epoch {
            epoch = progress.epoch;
            let (step, of, loss, speed) =
                (progress.step, progress.of, progress.loss, progress.examples_per_second);
            println!("epoch {epoch}: step {step}/{of}, loss {loss:.4}, {speed:.0} examples/s");
        }
    })?;
    let bits = report.parameters.iter().flatten().map(|value| u64::from(value.to_bits()));
    let digest = bits.fold(0u64, |digest, bits| (digest ^ bits).wrapping_mul(0x100_0000_01b3));
    println!("digest of the parameters: {digest:016x}");
    let elements: usize = report.parameters.iter().map(Vec::len).sum();
    println!(
        "{elements} parameters, accuracy {:.4}, loss {:.4}, {:.2} s ({:.2} s in the exchange), {:.1} steps/s",
        report.accuracy.unwrap_or(f64::NAN),
        report.loss,
        report.seconds,
        report.wait_seconds,
        report.steps as f64 / report.seconds,
    );
    Ok(())
}

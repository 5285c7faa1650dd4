"""The whole router on one machine: `dps up`, the emulated SGLang server, and the processes behind them."""

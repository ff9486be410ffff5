# Reads the log of pip or uv, for common/setup.sh. Prints how much is done, how much that is in all, and of what, as in
# "310 645 MB of tensorflow" or "12 90 packages"; nothing while that is unknown. -v installed: the number of packages in .venv.

/^ *Downloading / { name = $2; sub(/-[0-9].*/, "", name) }                                   # pip and uv
/^Progress / { done = $2 / 1e6; all = $4 / 1e6; what = "MB of " name }                       # pip --progress-bar=raw
/^Downloading .*MiB\)$/ { size[$2] = substr($3, 2) + 0; all += size[$2]; what = "MiB" }      # uv, which begins them all at once
/^ Downloaded / { done += size[$2] }
/^Installing collected packages: / { all = NF - 3; done = installed < all ? installed : all; what = "packages" }
END { if (all >= 1 && (done < all || what == "packages")) printf "%d %d %s\n", done, all, what }

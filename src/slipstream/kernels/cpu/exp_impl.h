// e^x over sixteen lanes. Included once per instruction set, inside its namespace, behind its lanes_*.h.

inline F exp16(F x) {
    // Polynomial of Cephes' expf (Moshier), below the smallest normal result zero.
    F y = min(x, splat(88.02969f));
    const I n = to_int(mul(y, splat(1.44269504f)));
    const F power = to_float(n);
    F r = fma(power, splat(-0.693359375f), y);
    r = fma(power, splat(2.12194440e-4f), r);
    F p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), splat(1.0f));
    F result = times_power(p, n);
    result = pick_less(x, splat(-87.33654f), splat(0.0f), result);
    return pick_nan(x, x, result);
}

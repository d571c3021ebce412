// Base-2 exponentials.
#pragma once

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^x without the special-function unit: nearest integer by a magic addend, a polynomial of degree 4 for the rest (relative error 3e-6), the
// exponent added to its bits. Below 2^-126 it stays near 2^-126. What is beyond 2^126 or NaN gives a huge positive number or NaN.
__device__ __forceinline__ float exp2_polynomial(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0fC2FC0000;\nmin.NaN.f32 %0, %0, 0f42FC0000;" : "=&f"(y) : "f"(x));  // -126 and 126
    const float shifted = y + 12582912.f, f = y - (shifted - 12582912.f);
    float poly = 9.5828529e-3f;
    poly = fmaf(poly, f, 5.5906426e-2f);
    poly = fmaf(poly, f, 2.4024099e-1f);
    poly = fmaf(poly, f, 6.9312418e-1f);
    poly = fmaf(poly, f, 1.f);
    return __int_as_float(__float_as_int(poly) + (__float_as_int(shifted) << 23));
}
